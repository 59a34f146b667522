/* A libnvidia-ml.so.1 for tests: as many equal GPUs as STUB_GPUS says. It checks what nvidia-ml-py passes through
 * ctypes, which no Python stand-in could. Names and numbers are nvml.h's. */
#include <stdio.h>
#include <stdlib.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, UNKNOWN = 999 };

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static char devices[64];

static int is_device(void *device) {
    return (char *)device >= devices && (char *)device < devices + number("STUB_GPUS", 0);
}

int nvmlInitWithFlags(unsigned flags) { return number("STUB_INIT", OK); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return "stub error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = number("STUB_GPUS", 0);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = devices + index;
    return is_device(*device) ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    snprintf(name, length, "Stub %d", (int)((char *)device - devices));
    return is_device(device) ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = number("STUB_MAJOR", 9);
    *minor = 0;
    return is_device(device) ? OK : INVALID_ARGUMENT;
}

/* GPUs without links do not support the question. The others have 18, of which STUB_LINKS are up. */
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
    int links = number("STUB_LINKS", 0);
    *active = (int)link < links;
    if (!is_device(device) || (links && link >= 18)) return INVALID_ARGUMENT;
    return links ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, unsigned *type) {
    *type = number("STUB_FAR_END", 0);
    return is_device(device) ? OK : INVALID_ARGUMENT;
}

/* capability 0: read, 1: write, 2: NVLink. Status 0 is good; STUB_ONE_WAY=1 is good only from the lower GPU up. */
int nvmlDeviceGetP2PStatus(void *one, void *other, int capability, int *status) {
    const char *names[] = {"STUB_READ", "STUB_WRITE", "STUB_NVLINK"};
    if (!is_device(one) || !is_device(other) || capability < 0 || capability > 2) return INVALID_ARGUMENT;
    *status = number(names[capability], 0);
    if (number("STUB_ONE_WAY", 0) && one > other) *status = 5;
    return OK;
}

int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *level) {
    *level = number("STUB_LEVEL", 50);
    return is_device(one) && is_device(other) ? OK : INVALID_ARGUMENT;
}

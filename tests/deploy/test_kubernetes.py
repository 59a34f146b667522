"""deploy/kubernetes: what Kubernetes takes, whose parts fit each other, the image and the proxy's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from proxy.settings import Settings, variables
from proxy.sources import DnsSource
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica
from tests.support.tiny_model import REPO

FOLDER = REPO / "deploy" / "kubernetes"
FOREIGN = {"ServiceMonitor", "Kustomization"}
"""Kinds that Kubernetes itself does not know."""
OLDEST = "1.29"

Manifest = dict[str, Any]


def load() -> list[Manifest]:
    """Return all documents of all files."""
    return [document for file in sorted(FOLDER.glob("*.yaml")) for document in YAML(typ="safe").load_all(file)]


MANIFESTS = load()


def one(kind: str, name: str) -> Manifest:
    (found,) = [m for m in MANIFESTS if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def workloads() -> Iterator[tuple[Manifest, Manifest]]:
    """Yield Deployment and StatefulSet, each with its pod."""
    for manifest in MANIFESTS:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest, manifest["spec"]["template"]


PROXY = one("Deployment", "lora-sync-proxy")["spec"]["template"]
CONTAINER = PROXY["spec"]["containers"][0]
ENVIRONMENT: dict[str, str] = {entry["name"]: entry["value"] for entry in CONTAINER["env"] if "value" in entry}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m.get('metadata', {}).get('name', '')}")
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_kubernetes_takes_it(manifest: Manifest, version: str) -> None:
    if manifest["kind"] not in FOREIGN:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_mistake_would_be_found() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**one("Service", "vllm"), "spec": {"ports": "8000"}}, OLDEST, strict=True)


def test_there_is_one_proxy_and_never_two() -> None:
    spec = one("Deployment", "lora-sync-proxy")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_the_proxy_takes_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name for name, _ in variables()}
    assert {entry["name"] for entry in CONTAINER["env"]} <= known
    for name in known:
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    settings = Settings.from_env()
    assert PROXY["spec"]["terminationGracePeriodSeconds"] > settings.listen.shutdown_s
    headless = one("Service", "vllm")
    assert headless["spec"]["clusterIP"] == "None"
    assert settings.discovery.discover == DnsSource("vllm", headless["spec"]["ports"][0]["port"])
    assert settings.control.min_ready == one("StatefulSet", "vllm")["spec"]["replicas"]
    assert settings.control.adapter_roots == (CONTAINER["volumeMounts"][0]["mountPath"],)


def test_the_user_is_the_images() -> None:
    users = re.findall(r"^USER (\d+)$", (REPO / "Dockerfile").read_text(), re.MULTILINE)
    assert users == [str(PROXY["spec"]["securityContext"]["runAsUser"])]


def test_nobody_has_more_rights_than_needed() -> None:
    for workload, pod in workloads():
        name = workload["metadata"]["name"]
        assert pod["spec"]["automountServiceAccountToken"] is False, name
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True, name
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["spec"]["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True and rights["allowPrivilegeEscalation"] is False, name
            assert rights["capabilities"] == {"drop": ["ALL"]}, name


def test_the_parts_fit_each_other() -> None:
    claims = {m["metadata"]["name"] for m in MANIFESTS if m["kind"] == "PersistentVolumeClaim"}
    ports_by_label = {}
    for workload, pod in workloads():
        labels = pod["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            ports_by_label[labels["app.kubernetes.io/name"]] = ports
            probes = [probe for name, probe in container.items() if name.endswith("Probe")]
            assert probes and all(probe["httpGet"]["port"] in ports for probe in probes)
        used = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
        assert used == claims
    for service in [m for m in MANIFESTS if m["kind"] == "Service"]:
        pods = ports_by_label[service["spec"]["selector"]["app.kubernetes.io/name"]]
        assert all(port["targetPort"] in pods for port in service["spec"]["ports"])
    assert one("StatefulSet", "vllm")["spec"]["serviceName"] == "vllm"
    for policy in [m for m in MANIFESTS if m["kind"] == "NetworkPolicy"]:
        assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] in ports_by_label


def test_replicas_are_reached_through_the_proxy_alone() -> None:
    (rule,) = one("NetworkPolicy", "vllm")["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": PROXY["metadata"]["labels"]}}]


def test_the_kustomization_names_what_is_there() -> None:
    (kustomization,) = [m for m in MANIFESTS if m["kind"] == "Kustomization"]
    files = {file.name for file in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "service-monitor.yaml"}
    assert set(kustomization["resources"]) == files
    images = {container["image"] for _, pod in workloads() for container in pod["spec"]["containers"]}
    assert {image["name"] for image in kustomization["images"]} == images
    assert kustomization["namespace"] == one("Namespace", "lora-sync")["metadata"]["name"]


def test_what_probes_and_prometheus_ask_for_is_answered() -> None:
    monitor = one("ServiceMonitor", "lora-sync-proxy")
    service = one("Service", "lora-sync-proxy")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {end["port"] for end in monitor["spec"]["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    asked = {probe["httpGet"]["path"] for name, probe in CONTAINER.items() if name.endswith("Probe")}
    asked |= {end["path"] for end in monitor["spec"]["endpoints"]}
    assert asked == {"/proxy/live", "/proxy/ready", "/metrics", "/proxy/replicas/metrics"}
    with SimulatedReplica() as replica, RunningProxy(replica.url) as proxy:
        assert [proxy.client.get(path).status_code for path in sorted(asked)] == [200] * len(asked)

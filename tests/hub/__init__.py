"""An offline Hub, and the tests that hold it to the real huggingface_hub and hf_xet.

offline_hub   OfflineHub: starts and ends it, gives clients of it
faults        what a test can make it do wrong
bucket        the state of a bucket, as a timeline          bucket_api   the same over HTTP
content       the bytes of all files (Xet)                  cas_api      the same over HTTP
job           a Job, as a process of this machine           job_api, job_door   over HTTP, and the way to its ports
xorb, shard   Xet's two binary formats
"""

"""An offline Hub, and the tests that hold it to the real huggingface_hub and hf_xet.

For tests elsewhere
  offline_hub     OfflineHub: starts and ends one, gives clients of it, sets its faults
  mount           BucketMount: a bucket as a directory, as late and torn as hf-mount shows it
  faults          what can go wrong
  fleets          `lora-sync jobs up` as a process, on Jobs that are processes, and whether all are gone
  job_replica     what runs in a Job in place of vllm              job_trainer     a pretend trainer

The process behind OfflineHub
  hub_process     puts it together; the calls that only a test makes
  bucket          a bucket's state, as a timeline               bucket_api        over HTTP
  content         the bytes of all files                        cas_api           over HTTP (Xet)
  xorb, shard     Xet's two binary formats
  job             a Job, as a process of this machine           job_api, job_door over HTTP, and the way to its ports
  job_network     ... that others reach by name, in a group

  parent          lets a process end with the test that started it

The process behind BucketMount
  mount_process   the calls of FUSE
  mount_remote    what it remembers of the Hub
  mount_writes    what was written and has yet to go up
"""

"""A fleet on Hugging Face Jobs: N replicas and a trainer with the proxy beside it, from one file and one command.

    config      what a fleet is: every field, documented where it stands; read from YAML
    template    the file that `lora-sync jobs init` writes
    launch      from a config to the calls that start its Jobs. Data
    seen        what the Hub shows of a Job, by its labels
    plan        what to do next: `plan(wanted, seen) -> actions`. Pure
    watch       the loop behind `up`: look, plan, act, until the trainer ends; then cancel everything
    ending      cancel every Job that a label names, and see it through
    preflight   what would go wrong, and what to do about it
    hub         huggingface_hub's Jobs: which answers are final, and which say nothing
    health      the replicas' /health, from outside
    state       which fleets this machine has started
    signals     Ctrl-C and its like, noted until the Jobs are canceled
    target      which fleet a command is about
    beside      inside the trainer Job: the proxy beside the trainer's command
    screen      a live table, plain lines, or JSON
    commands    `lora-sync jobs`

`docs/jobs.md` is for users.
"""

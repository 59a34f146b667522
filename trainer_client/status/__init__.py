"""See a running proxy from a terminal: `lora-sync status` once, `lora-sync top` for as long as one looks.

reading    what the proxy says of itself at one moment, and rates between two of them
view       how that is shown in eighty columns
commands   the two commands
"""

"""Chaos: thousands of rollouts and a training run, while something breaks every second. Nothing may be lost or wrong.

scale      how much of everything: on simulators, quickly, on real vLLM
fleet      the replicas and the proxy, as processes, each with its wire
wire       the network between them, as a relay of bytes
disk       a small disk to publish on
views      what each replica sees of it
faults     what can go wrong with them, and how it ends
monkey     deals them out, aims, strikes, and watches how long the fleet takes to recover
trainers   announce a new policy every few seconds: as TRL does, and with TrainerClient
rollouts   ask as TRL does, again and again until there is an answer
streams    puts streams together
judge      whether an answer came from the weights that were asked for
tally      what became of every rollout, by kind of fault
report     the table, the JSON and the verdict
"""

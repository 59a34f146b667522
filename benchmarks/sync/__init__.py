"""How long a sync takes: the published pattern against ours, on an offline Hub with mounts that land late.

world       a Hub, replicas with a mount each, and a proxy
patterns    ways to bring a policy to all replicas
watch       what the replicas do meanwhile, and when the Hub lists the files
__main__    which rows, how often, and the table
"""

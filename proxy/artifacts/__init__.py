"""What a LoRA directory is: its config, its weights, its digest and the manifest that makes it published.

Leaf room: reads files, and knows what to ask the Hub about those in a bucket; knows nothing of replicas or torch. The
proxy and the trainer client share it, so that both judge a directory alike.
"""

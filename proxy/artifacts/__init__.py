"""What a LoRA directory is: its config, its weights, its digest and the manifest that makes it published.

Leaf room: reads files, knows nothing of HTTP, replicas or torch. The proxy and the trainer client share it, so that
both judge a directory alike.
"""

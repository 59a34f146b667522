"""An adapter merged into its base model, as a checkpoint: for what vLLM cannot serve beside the base model.

    settings    how a user wants it
    scratch     where the checkpoint is until the store has it
    merge       the whole way, from a model to a folder with a checkpoint
    layers      ... tensor by tensor, each layer merged in a copy of its own: the training model stays as it is
    names       ... by the names of the base model's own checkpoint
    shards      ... in files of bounded size
    load        the model, where only an adapter's files are there

Only `settings` and `scratch` can be imported without torch, transformers and peft (the extra `merge`).
"""

"""A small real trainer to try deltarefit with: a language model, a verifiable task, AdamW on the CPU.

``model`` finds or makes the model, ``task`` the problems, ``train`` the optimizer steps. Needs the ``demo``
extra; PyTorch and transformers are imported only when something is called.
"""

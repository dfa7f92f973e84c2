"""Where bits come from: adapters that implement ``deltarefit.ports.Source``.

``checkpoint``: a safetensors file or a Hugging Face checkpoint directory. ``state_dict``: anything with named tensors.
``fsdp``: a model sharded with FSDP2 or other DTensors. ``megatron``: a Megatron-Core model. The last three are built on
``tensors``, which also serves for writing one's own.
"""

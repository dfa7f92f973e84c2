"""Where bits come from: adapters that implement ``deltarefit.ports.Source``.

``checkpoint``: a safetensors file or a Hugging Face checkpoint directory.
"""

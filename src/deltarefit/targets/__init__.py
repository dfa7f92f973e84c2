"""Where bits go: adapters that implement ``deltarefit.ports.Target``.

``checkpoint``: a Hugging Face checkpoint directory, written in place.
``module``: a live torch model in this process.
"""

"""Tests against real vLLM and SGLang on a CPU. They run in an environment of their own: `make test-engines`."""

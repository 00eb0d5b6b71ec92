"""Load-testing and benchmarking of LLM serving engines."""

__version__ = "0.1.0"

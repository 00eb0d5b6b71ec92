"""A small LLM serving engine with paged KV and continuous batching: the default target, and the bench's known truth."""

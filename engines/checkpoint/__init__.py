"""A training on disk: safetensors and JSON, never a pickle; written whole or not at all."""

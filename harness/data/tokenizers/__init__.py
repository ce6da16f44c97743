"""Text to token ids and back: GPT-2's vocabulary and its kin from tiktoken's files, and byte-level BPE trained here."""

#!/usr/bin/env python3
"""Writes o200k_base.bin, the vocabulary that `engine/src/results/tokens/o200k.rs` reads.

    curl -O https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken
    engine/data/o200k_base.py o200k_base.tiktoken

The source has one token a line: its bytes in base64, and its rank, from 0 upwards. The result is
a zlib stream of the length of each token in the order of the ranks, one byte each, then the bytes
of all tokens, the shortest first and those of one length in the order of their ranks: in this
order they compress best.
"""
import base64
import hashlib
import pathlib
import sys
import zlib

# The checksum that OpenAI publishes with the file, in tiktoken_ext/openai_public.py.
SOURCE_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    source = pathlib.Path(sys.argv[1]).read_bytes()
    if hashlib.sha256(source).hexdigest() != SOURCE_SHA256:
        sys.exit(f"{sys.argv[1]} is not the published o200k_base.tiktoken")
    tokens = []
    for line in source.splitlines():
        token, rank = line.split()
        if int(rank) != len(tokens):
            sys.exit(f"rank {int(rank)} is at position {len(tokens)}")
        tokens.append(base64.b64decode(token))
    content = bytes(map(len, tokens)) + b"".join(sorted(tokens, key=len))
    result = pathlib.Path(__file__).with_suffix(".bin")
    result.write_bytes(zlib.compress(content, 9))
    print(f"{result}: {len(tokens)} tokens, {result.stat().st_size} bytes")
    print(f"SHA-256 of the content: {hashlib.sha256(content).hexdigest()}")


main()

"""The tokenizer files of a synthetic snapshot: tiktoken.model and tokenizer_config.json.

The ranks are made up but sound: byte-pair merging reaches every one of them. Pure functions, any thread.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from typing import Any

from k3.model.vocabulary import SPECIAL_PLACES
from k3.verify.synthetic.shape import SyntheticModel

_KEPT_IN_TEXT = ("<|open|>", "<|close|>", "<|sep|>")
_ROLES = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}


def rank_bytes(count: int) -> Iterator[bytes]:
    """Return the byte strings of ranks 0, 1, … count - 1, all different.

    First the single bytes in the published order: those that GPT-2 shows as themselves, then the others. Then
    syllables (consonant, vowel), alone, after a space, in pairs and in triples. No merge other than consonant
    with vowel exists among letters, so any order of merging the syllables of a word gives the same bytes.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)).difference(shown))
    singles = (bytes([value]) for value in shown + hidden)

    syllables = [c + v for c in "tnshrdlcmwfgypbvkjxqz" for v in "eaoiu"]
    words = itertools.chain(
        syllables,
        (" " + s for s in syllables),
        (a + b for a, b in itertools.product(syllables, repeat=2)),
        (" " + a + b for a, b in itertools.product(syllables, repeat=2)),
        (a + b + c for a, b, c in itertools.product(syllables, repeat=3)),
    )
    ranks = itertools.chain(singles, (word.encode() for word in words))
    return itertools.islice(ranks, count)


def tiktoken_model(model: SyntheticModel) -> bytes:
    """tiktoken.model: one line of base64 and rank per rank, exactly vocab - 256 of them."""
    lines = [b"%s %d\n" % (base64.b64encode(r), i) for i, r in enumerate(rank_bytes(model.first_special))]
    if len(lines) != model.first_special:
        raise ValueError(f"vocab {model.vocab} is larger than this generator's {len(lines)} ranks allow")
    return b"".join(lines)


def tokenizer_config(model: SyntheticModel) -> dict[str, Any]:
    """tokenizer_config.json as an object. Its eos is [EOS], config.json's is not: as published."""
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    added = {
        str(model.first_special + place): {"content": name, **plain, "special": name not in _KEPT_IN_TEXT}
        for name, place in SPECIAL_PLACES.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": [
            name for name in SPECIAL_PLACES if name not in _KEPT_IN_TEXT and name not in _ROLES.values()
        ],
        "bos_token": _ROLES["bos_token"],
        "clean_up_tokenization_spaces": False,
        "eos_token": _ROLES["eos_token"],
        "extra_special_tokens": {},
        "model_max_length": int(1e30),
        "pad_token": _ROLES["pad_token"],
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": _ROLES["unk_token"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }

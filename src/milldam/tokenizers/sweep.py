"""The characters of which an encoder makes other ids than HF tokenizers: all of Unicode is encoded with both.

Libraries know different versions of Unicode: a letter that is new in one of them is a sign in the other, so that words
end elsewhere; a mark that is new in one is put in another order, or joined to what is before it, by NFC. Each shows in
two contexts: what is around it is divided otherwise where the library takes it for something else (`"  ", "'s"`), and
marks change places (`a`, a mark of a high class, the character, a mark of the lowest class). An exhaustive comparison
in 53 contexts found none beside (docs/log.md).

Takes a second or two for a tokenizer, in a process of its own whose memory comes back. Where many characters in a row
are of one kind, one in 16 or 64 is tried, and all near one that differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata

import numpy as np

from milldam.memory import keep_arrow_lean, release
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE, Encoder, Ranges, encode_each

_CONTEXTS = (("  ", "'s"), ("a\u0345", "\u0334"))
_COMPOSED = (
    "\U000105d2\u0307 \U000105da\u0307 \U00011382\U000113c9 \U00011384\U000113bb \U0001138b\U000113c2 "
    "\U0001138b\U000113c5 \U0001138b\U000113c7 \U0001138b\U000113c8 \U00011390\U000113c9 \U000113c2\U000113c2 "
    "\U000113c2\U000113b8 \U000113c2\U000113c9 \U00011935\U00011930 \U0001611e\U0001611e \U0001611e\U0001611f "
    "\U0001611e\U00016120 \U0001611e\U00016121 \U0001611e\U00016122 \U0001611e\U00016123 \U0001611e\U00016124 "
    "\U0001611e\U00016125 \U0001611e\U00016126 \U0001611e\U00016127 \U0001611e\U00016128 \U0001611e\U00016129 "
    "\U00016121\U0001611f \U00016121\U00016120 \U00016122\U0001611f \U00016129\U0001611f \U00016d63\U00016d67 "
    "\U00016d63\U00016d68 \U00016d67\U00016d67 \U00016d67\U00016d68 \U00016d69\U00016d67"
)
"""Pairs that NFC joins since Unicode 13 and 16; older ones are in Python's tables."""
_TRIED = (
    *((1, 0x3500), (0x3500, 0x4D00, 16), (0x4D00, 0x4F00), (0x4F00, 0x9E00, 16), (0x9E00, 0xAD00)),
    *((0xAD00, 0xD700, 16), (0xD700, 0xD800), (0xE000, 0xF800, 64), (0xF800, 0x20000), (0x20000, 0x2A600, 16)),
    *((0x2A600, 0x34000), (0x34000, 0xE0000, 64), (0xE0000, 0xF0000, 16), (0xF0000, 0x110000, 64)),
)
"""First, end and step: the middles of ideographs and syllables, and what is private or unassigned, by samples."""
_TOGETHER, _NEAR = 32, 63
_MOST = 1 << 15
"""Characters that may differ, or be near one: beyond, encoders differ on everything."""


def differing_characters(tokenizer_json: str, *, plain_specials: bool, normalizes: bool) -> Ranges | None:
    """Of which gigatoken gives other ids than HF tokenizers; only one of them is held at a time.

    None: so many, or such common ones, that it can't be used. `normalizes`: text is changed before it is divided.
    """

    def differ(texts: list[str]) -> list[bool]:
        """Some at a time, for which HF tokenizers takes 5 MB."""
        several, ids = [texts[at : at + 64] for at in range(0, len(texts), 64)], []
        for name in (GIGATOKEN, HUGGINGFACE):
            encoder = Encoder(name, tokenizer_json, plain_specials=plain_specials)
            ids.append([one for some in several for one in encode_each(encoder, some)])
            del encoder
            release()
        return [not np.array_equal(one, other) for one, other in zip(*ids, strict=True)]

    points = np.concatenate([np.arange(*one) for one in _TRIED])
    contexts = _CONTEXTS if normalizes else _CONTEXTS[:1]
    rows = [points[first : first + _TOGETHER] for first in range(0, len(points), _TOGETHER)]
    tried_rows = [(row, context) for context in contexts for row in rows]
    texts = [before + (after + before).join(map(chr, row.tolist())) + after for row, (before, after) in tried_rows]
    wrong = [row for (row, _), differs in zip(tried_rows, differ(texts), strict=True) if differs]
    near = np.unique(np.concatenate([points[:0], *wrong])[:, None] + np.arange(-_NEAR, _NEAR + 1))
    near = near[(near > 0) & (near < 0x110000) & ((near < 0xD800) | (near > 0xDFFF))]
    if len(near) > _MOST:
        return None
    tried = [(one, f"{before}{chr(one)}{after}") for before, after in contexts for one in near.tolist()]
    if normalizes:
        composed = {unicodedata.normalize("NFD", chr(one)) for one in range(0xA0, 0x30000)}
        pairs = [*sorted(pair for pair in composed if len(pair) > 1), *_COMPOSED.split(" ")]
        # The last one in Unicode's order is the rarest: what is joined to many others stays with the fast encoder.
        tried += [(ord(max(pair)), f"a{pair}") for pair in pairs]
    found = {one for (one, _), differs in zip(tried, differ([text for _, text in tried]), strict=True) if differs}
    if found and min(found) < 0x80:
        return None
    starts = sorted(one for one in found if one - 1 not in found)
    stops = sorted(one for one in found if one + 1 not in found)
    return tuple(zip(starts, stops, strict=True))


def sweep_apart(tokenizer_json: str, *, plain_specials: bool, normalizes: bool) -> Ranges | None:
    """The same in a process of its own. Raises RuntimeError where one of the encoders can't be made."""
    options = {"tokenizer_json": tokenizer_json, "plain_specials": plain_specials, "normalizes": normalizes}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-m", "milldam.tokenizers.sweep"]
    asked = json.dumps(options).encode("utf-8", "surrogatepass")
    done = subprocess.run(command, input=asked, capture_output=True, env=environment)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(said[-1].partition(": ")[2] or said[-1] if said else f"exit code {done.returncode}")
    found = json.loads(done.stdout)
    return found and tuple((first, last) for first, last in found)


if __name__ == "__main__":
    keep_arrow_lean()
    asked = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
    sys.stdout.write(json.dumps(differing_characters(**asked)))

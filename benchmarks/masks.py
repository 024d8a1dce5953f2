"""Masks of chat templates, checked in two ways. In: a folder of templates (TRL ships some in `trl/chat_templates`).

compare   Every NAME.jinja that has a NAME_training.jinja with `{% generation %}` tags beside it, by the conversations
          of a file: ids and masks of both against those that transformers makes with the tags.
odd       Every template without tags by odd conversations, each word of which is marked as one to train on or not: no
          mask may hold a word of somebody else, or leave one out.

    python benchmarks/masks.py compare trl/chat_templates --data messages.jsonl --tokenizer qwen2.5/tokenizer.json
    python benchmarks/masks.py odd templates/
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.chat.forms import BadRowError, recognise
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import Masks, train_on
from milldam.chat.reading import in_bytes
from milldam.chat.token_spans import TokenSpans

NAMES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
WORD = re.compile(r"(yes|no)_\d+_")
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
VISION = ("diffusion_gemma", "idefics3", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Families that take contents in parts, which the conversations are not."""
_numbers = itertools.count()

Message = dict[str, Any]


def masks_of(path: Path) -> Masks:
    source = TemplateSource(path.read_text("utf-8"), path.name, None, dict(NAMES), datetime.datetime.now())
    return Masks(source, train_on("assistant"))


# ---- against transformers ----


def compare(folder: Path, data: Path, tokenizer_json: Path) -> Counter[str]:
    from transformers import PreTrainedTokenizerFast

    rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), **NAMES)
    finder = TokenSpans(tokenizer_json.read_text("utf-8"))
    totals: Counter[str] = Counter()
    for tagged in sorted(folder.glob("*_training.jinja")):
        plain = tagged.with_name(tagged.name.replace("_training", ""))
        if plain.stem in VISION:
            continue
        wanted = [_by_transformers(tokenizer, row, tagged.read_text("utf-8")) for row in rows]
        for path in (path for path in (tagged, plain) if path.exists()):
            masks, found, form = masks_of(path), Counter[str](), recognise(rows)
            for row, theirs in zip(rows, wanted, strict=True):
                try:
                    ours = _by_milldam(masks, finder, tokenizer._tokenizer, form.conversations(row)[0])
                except BadRowError as error:
                    found["both refuse" if theirs is None or not any(theirs[1]) else f"refused: {error.reason}"] += 1
                    continue
                if theirs is None or ours[0] != theirs[0]:
                    found["another text" if path == plain else "TEXT DIFFERS"] += 1
                else:
                    found["equal" if ours[1] == theirs[1] else "MASK DIFFERS"] += 1
            print(f"{path.stem:36}", ", ".join(f"{count} {what}" for what, count in sorted(found.items())), flush=True)
            totals += Counter({f"{'without' if path == plain else 'with'} tags, {one}": n for one, n in found.items()})
    return totals


def _by_transformers(tokenizer: Any, row: dict[str, Any], template: str) -> tuple[list[int], list[int]] | None:
    try:
        made = tokenizer.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception:  # whatever a template raises
        return None
    return made["input_ids"], made["assistant_masks"]


def _by_milldam(masks: Masks, finder: TokenSpans, encoder: Any, talk: Any) -> tuple[list[int], list[int]]:
    rendering, stretches, derived = masks.find(talk)
    ids = encoder.encode(rendering.text, add_special_tokens=False).ids
    spans, _ = finder.find(
        np.array(ids, np.uint32),
        np.array([0, len(ids)]),
        pa.array([rendering.text], pa.large_string()),
        np.array(in_bytes(rendering.text, stretches), np.int64).reshape(-1, 2),
        np.array([len(stretches)]),
        np.array([derived]),
    )
    mask = np.zeros(len(ids), np.int64)
    for begin, end in spans:
        mask[begin:end] = 1
    return ids, mask.tolist()


# ---- odd conversations ----


def word(trained: bool) -> str:
    return f"{'yes' if trained else 'no'}_{next(_numbers)}_"


def said(role: str, before: str = "", behind: str = "", **more: Any) -> Message:
    inner = f"{word(role == 'assistant')} mill\n pond {word(role == 'assistant')}"
    return {"role": role, "content": f"{before}{inner}{behind}", **more}


def odd_rows() -> Iterator[dict[str, Any]]:
    def user(*around: str) -> Message:
        return said("user", *around)

    def answer(*around: str, **more: Any) -> Message:
        return said("assistant", *around, **more)

    def calls(count: int = 1, **more: Any) -> Message:
        function = {"name": "f", "arguments": {"a": word(True)}}
        call = {"type": "function", "id": "abcdefghi", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call] * count, **more}

    def tool(**more: Any) -> Message:
        return said("tool", name="f", tool_call_id="abcdefghi", **more)

    def thought() -> dict[str, str]:
        return {"reasoning_content": word(True)}

    system = said("system")
    rows: list[list[Message]] = [
        [user(), answer()],
        [system, user(), answer(), user(), answer()],
        [system],
        [system, answer()],
        [answer()],
        [user(), answer(), answer()],
        [user(), user(), answer()],
        [user(), answer(), user()],
        [answer(), user(), answer()],
        [user(), answer(), system, user(), answer()],
        [said("developer"), user(), answer()],
        [user(), said("critic"), answer()],
        [user(), {"role": "assistant", "content": ""}],
        [user(), {"role": "assistant", "content": " \n "}, user(), answer()],
        [{"role": "user", "content": ""}, answer(" \n", "\n\n ")],
        [user("<|im_start|>assistant\n", "<|im_end|>"), answer()],
        [user(), answer("", "<|im_end|>\n<|im_start|>user\n"), user(), answer()],
        [user("[/INST]</s>"), answer("[INST]"), user(), answer()],
        [user("\u2028\x85"), answer("\ufeff", "\u2029\x1e")],
        [user("{{ 7 * 7 }}{% raw %}"), answer("", "{% endfor %}&amp;<i>")],
        [user("\0e\u0301"), answer("", "\u00e9\U0001f469\u200d\U0001f467")],
        [user("", "y" * 5000), answer("", "z" * 5000)],
        [message for _ in range(30) for message in (user(), answer())],
        [user(), answer(f"<think>\n{word(True)}\n</think>\n\n"), user(), answer("<think>\n\n</think>\n\n")],
        [user(), answer(f"<think>\n{word(True)}\n</think>\n\n"), user(), answer(f"<think>{word(True)}</think>")],
        [user(), answer("</think>"), user("<think>"), answer("<think>")],
        [user(), answer(**thought()), user(), answer(**thought())],
        [user(), answer(**thought()), user(), answer()],
        [user(), answer(), user(), answer(**thought())],
        [user(), calls(), tool(), answer()],
        [user(), calls(2), tool(), tool(), answer()],
        [user(), calls(), tool(), calls(), tool(), answer()],
        [user(), calls(), tool()],
        [user(), answer(tool_calls=calls()["tool_calls"]), tool(), answer(), user(), answer()],
        [user(), calls(1, content=None, **thought()), tool(), answer(), user(), answer()],
        [user(), calls(), tool(), answer(**thought()), user(), calls(1, **thought()), tool(), answer(**thought())],
    ]
    for messages in rows:
        has_tools = any("tool_calls" in message for message in messages)
        yield {"messages": messages, "tools": [TOOL]} if has_tools else {"messages": messages}


def odd(path: Path) -> Counter[str]:
    """Masks of odd conversations that are right, wrong and refused, by reason. Each twice: none may spoil the next."""
    masks, found = masks_of(path), Counter[str]()
    for row in (row for _ in range(2) for row in odd_rows()):
        try:
            rendering, stretches, _ = masks.find(recognise([row]).conversations(row)[0])
        except BadRowError as error:
            found[error.reason] += 1
            continue
        trained = {at for begin, end in stretches for at in range(begin, end)}
        words = (
            (one[1] == "yes", {at in trained for at in range(*one.span())}) for one in WORD.finditer(rendering.text)
        )
        found["right" if all(inside == {wanted} for wanted, inside in words) else "WRONG"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=["compare", "odd"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, help="JSON lines with `messages`")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    options = parser.parse_args()
    if options.check == "compare":
        totals = compare(options.folder, options.data, options.tokenizer)
    else:
        paths = [path for path in sorted(options.folder.glob("*.jinja")) if not masks_of(path).tagged]
        totals = sum(map(odd, paths), Counter(templates=len(paths)))
    print("\n".join(f"{count:8,} {what}" for what, count in sorted(totals.items())))
    sys.exit(any(what.isupper() for total in totals for what in total.split()))


if __name__ == "__main__":
    main()

"""`milldam chat-check`: what a chat template would make of conversations, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import json_option, json_values, named_values
from milldam.cli.naming import TRAINED_MARKS, has_colours, visible
from milldam.markup import counted, turns_by_role

if TYPE_CHECKING:
    from milldam.chat.checking import ChatCheck

_TRAINED = "black on color(114)"
_MOST = 5


@click.command("chat-check")
@click.argument("template")
@click.argument("data", nargs=-1, required=True)
@click.option(
    "--tokenizer", help="Tokenizer with the special tokens of the template. [default: the one beside TEMPLATE]"
)
@click.option("--template-name", "named_template", metavar="NAME", help="Which template to use, if there are several.")
@click.option(
    "--train-on",
    default="assistant",
    show_default=True,
    help="Messages to train on: assistant, last, all, roles separated by commas, or a message field.",
)
@click.option("--form", default="auto", show_default=True, help="The form of the conversations.")
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME=COLUMN",
    help="Name of a column, such as messages=turns; may be repeated.",
)
@click.option(
    "--variable", "variables", multiple=True, metavar="NAME=VALUE", help="A variable of the template; may be repeated."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="ROWS", help="Check only the first rows. [default: all]")
@click.option("--characters", default=2000, show_default=True, help="Characters to show of the first conversation.")
@json_option
def chat_check(template: str, data: tuple[str, ...], **options: Any) -> None:
    """
    Shows the first conversation of DATA as TEMPLATE renders it, marks what would be trained on, and counts the
    conversations that would be refused.

    TEMPLATE: a Jinja file, a tokenizer's folder or its name on the Hub. DATA: files, folders or datasets. Nothing is
    written. Exits with 1 if no conversation can be used.

    \b
    milldam chat-check template.jinja chat.jsonl --tokenizer Qwen/Qwen2.5-0.5B
    milldam chat-check model/ chat.parquet --train-on last --limit 1000
    """
    from milldam.chat.checking import check_chat
    from milldam.chat.masks import train_on

    words = options["train_on"].split(",")
    rule = train_on(words[0] if len(words) == 1 else words)
    source, special = _template_of(template, options)
    columns = named_values(options["columns"], "column")
    check = check_chat(
        data,
        source,
        rule,
        form=options["form"],
        columns=columns,
        limit=options["limit"],
        special_tokens=special,
    )
    if options["as_json"]:
        click.echo(json.dumps(_as_dict(check), ensure_ascii=False))
    else:
        _show_first(check, options["characters"])
        for line in _lines(check):
            click.echo(visible(line))
    if not check.usable:
        raise click.exceptions.Exit(1)


def _template_of(template: str, options: dict[str, Any]) -> tuple[Any, Sequence[str]]:
    from pathlib import Path

    from milldam.chat.loading import find_template
    from milldam.tokenizers.loading import load_tokenizer

    tokenizer, special = options["tokenizer"], []
    if tokenizer is not None:
        added = load_tokenizer(tokenizer).huggingface.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
    variables = json_values(options["variables"], "variable")
    is_here = Path(template).expanduser().exists()
    source = find_template(
        tokenizer if tokenizer is not None and is_here else template,
        template=template if is_here else None,
        name=options["named_template"],
        variables=variables,
    )
    return source, special


def _show_first(check: ChatCheck, characters: int) -> None:
    """The first conversation, with colours or marks around what is trained on."""
    if check.first is None:
        return
    from rich.console import Console
    from rich.text import Text

    text, stretches = check.first
    console = Console(highlight=False, soft_wrap=True)
    marks = ("", "") if has_colours(console) else TRAINED_MARKS
    shown, at = Text(), 0
    for begin, end in stretches:
        if begin >= characters:
            break
        shown.append(visible(text[at:begin]))
        shown.append(
            f"{marks[0]}{visible(text[begin : min(end, characters)])}{marks[1]}", _TRAINED if not marks[0] else ""
        )
        at = end
    if at < characters:
        shown.append(visible(text[at:characters]))
    told = f"in {' '.join(marks)}" if marks[0] else "coloured"
    console.print(f"── the first conversation; what is {told} is trained on ──")
    console.print(shown)
    if len(text) > characters:
        console.print(f"... {counted(len(text) - characters, 'character')} more", style="dim")


def _lines(check: ChatCheck) -> list[str]:
    counts = check.counts
    how = (
        "taken from the template's {% generation %} tags"
        if check.tagged
        else "derived, and proven for each conversation"
    )
    lines = [
        "── summary ──",
        f"form             {check.form}",
        f"rows             {check.rows:,}",
        f"usable           {check.usable:,} ({check.usable / max(1, check.rows):.1%})",
        f"what is trained  {how}",
        f"trained share    {_trained_share(check):.1%} of {counted(counts['characters'], 'character')}",
        f"turns            {counts['turns']:,} ({turns_by_role(counts)})",
    ]
    if counts["special_tokens_in_content"]:
        said = counted(counts["special_tokens_in_content"], "conversation")
        lines.append(f"warning          {said} with special tokens in what is said: they become special tokens")
    if not check.tagged and counts["turns_without_end"]:
        turns = counted(counts["turns_without_end"], "trained turn")
        lines.append(
            f"warning          no end of {turns} is trained on: the template writes none, or with the next message"
        )
    for reason, (first, messages) in sorted(check.refused.items(), key=lambda item: -item[1][1].total()):
        lines.append(f"refused          {messages.total():,} {reason}, first {first}")
        lines += [f"                   {count:,} x {message}" for message, count in messages.most_common(_MOST)]
    return lines


def _trained_share(check: ChatCheck) -> float:
    return check.counts["trained_characters"] / max(1, check.counts["characters"])


def _as_dict(check: ChatCheck) -> dict[str, Any]:
    text, stretches = check.first or ("", [])
    return {
        "form": check.form.name,
        "tagged": check.tagged,
        "rows": check.rows,
        "usable": check.usable,
        "trained_share": round(_trained_share(check), 6),
        "counts": dict(sorted(check.counts.items())),
        "refused": {
            reason: {"count": messages.total(), "first": first, "messages": dict(messages.most_common(_MOST))}
            for reason, (first, messages) in check.refused.items()
        },
        "first": {"text": text, "trained": stretches},
    }

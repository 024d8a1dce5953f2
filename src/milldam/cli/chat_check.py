"""`milldam chat-check`: what a chat template would make of conversations, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from milldam.cli.commands import json_option, pairs
from milldam.cli.naming import TRAINED_MARKS, visible
from milldam.markup import counted, turns_by_role

_TRAINED = "black on color(114)"
_MOST, _CHARACTERS = 5, 2000


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
@pairs("--column", "columns", "NAME=COLUMN", "Name of a column, such as messages=turns.")
@pairs("--variable", "variables", "NAME=VALUE", "A variable of the template.")
@click.option("--limit", type=click.IntRange(min=1), metavar="ROWS", help="Check only the first rows. [default: all]")
@json_option
def chat_check(
    template: str,
    data: tuple[str, ...],
    tokenizer: str | None,
    named_template: str | None,
    train_on: str,
    variables: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
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
    from milldam.chat.loading import find_template
    from milldam.chat.masks import train_on as rule_of
    from milldam.tokenizers.loading import load_tokenizer

    words = train_on.split(",")
    rule, special = rule_of(words[0] if len(words) == 1 else words), []
    if tokenizer is not None:
        added = load_tokenizer(tokenizer).huggingface.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
    is_here = Path(template).expanduser().exists()
    source = find_template(
        tokenizer if tokenizer is not None and is_here else template,
        template=template if is_here else None,
        name=named_template,
        variables=variables,
    )
    check = check_chat(data, source, rule, special_tokens=special, **options)
    counts, (text, stretches) = check.counts, check.first or ("", [])
    share = counts["trained_characters"] / max(1, counts["characters"])
    refused: dict[str, dict[str, Any]] = {
        reason: {"count": messages.total(), "first": first, "messages": dict(messages.most_common(_MOST))}
        for reason, (first, messages) in sorted(check.refused.items(), key=lambda item: -item[1][1].total())
    }
    if as_json:
        facts = {"form": check.form.name, "tagged": check.tagged, "rows": check.rows, "usable": check.usable}
        facts |= {"trained_share": round(share, 6), "counts": dict(sorted(counts.items()))}
        facts |= {"refused": refused, "first": {"text": text, "trained": stretches}}
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        if check.first is not None:
            _show_first(text, stretches)
        how = "taken from {% generation %} tags" if check.tagged else "derived, and proven for each conversation"
        lines = [
            "── summary ──",
            f"form             {check.form}",
            f"rows             {check.rows:,}",
            f"usable           {check.usable:,} ({check.usable / max(1, check.rows):.1%})",
            f"what is trained  {how}",
            f"trained share    {share:.1%} of {counted(counts['characters'], 'character')}",
            f"turns            {counts['turns']:,} ({turns_by_role(counts)})",
        ]
        if counts["special_tokens_in_content"]:
            said = counted(counts["special_tokens_in_content"], "conversation")
            lines.append(f"warning          {said} with special tokens in what is said: they become special tokens")
        if not check.tagged and counts["turns_without_end"]:
            turns = counted(counts["turns_without_end"], "trained turn")
            lines.append(f"warning          no end of {turns} is trained on: the template writes it elsewhere or never")
        for reason, one in refused.items():
            lines.append(f"refused          {one['count']:,} {reason}, first {one['first']}")
            lines += [f"                   {count:,} x {message}" for message, count in one["messages"].items()]
        click.echo(visible("\n".join(lines)))
    if not check.usable:
        raise click.exceptions.Exit(1)


def _show_first(text: str, stretches: list[Any]) -> None:
    """The first conversation, with colours or marks around what is trained on."""
    from rich.console import Console
    from rich.text import Text

    console, shown, at = Console(highlight=False, soft_wrap=True), Text(), 0
    coloured = console.is_terminal and not console.no_color
    left, right = ("", "") if coloured else TRAINED_MARKS
    for begin, end in (one for one in stretches if one[0] < _CHARACTERS):
        shown.append(visible(text[at:begin]))
        shown.append(f"{left}{visible(text[begin : min(end, _CHARACTERS)])}{right}", _TRAINED if coloured else "")
        at = end
    shown.append(visible(text[at:_CHARACTERS]))
    told = "coloured" if coloured else f"in {left} {right}"
    console.print(f"── the first conversation; what is {told} is trained on ──")
    console.print(shown)
    if len(text) > _CHARACTERS:
        console.print(f"... {counted(len(text) - _CHARACTERS, 'character')} more", style="dim")

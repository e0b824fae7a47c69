"""Rows that fit a terminal of any width: nothing in them is cut, and no column is empty. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `key` columns name the row, `long` ones go beneath it first; numbers are right."""

    name: str
    key: bool = False
    number: bool = False
    long: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows beside each other; where they do not fit, long cells beneath, then all but the keys.

    A column without any text is left out. `total`: the last row is the sum of those before.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]
    total: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = [[_text(cell) for cell in row] for row in self.rows]
        shown = [at for at, _ in enumerate(self.columns) if any(row[at].plain for row in texts)]
        short = [at for at in shown if not self.columns[at].long]
        width = options.max_width
        for beside in (shown, short):
            if _width(self.columns, texts, beside) <= width:
                yield from self._beside(texts, beside, [at for at in shown if at not in beside])
                return
        yield from self._stacked(texts, shown)

    def _beside(
        self, texts: list[list[Text]], beside: list[int], beneath: list[int]
    ) -> Iterator[Table | Padding]:
        widths = [_widest(self.columns[at].name, (row[at] for row in texts)) for at in beside]
        groups = [[row] for row in texts] if beneath else [texts]
        for number, group in enumerate(groups):
            table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=not number)
            for at, wide in zip(beside, widths, strict=True):
                column = self.columns[at]
                table.add_column(
                    column.name,
                    justify="right" if column.number else "left",
                    no_wrap=True,
                    min_width=wide,
                )
            for row in group:
                is_total = self.total and row is texts[-1]
                table.add_row(*(row[at] for at in beside), style="bold" if is_total else None)
            yield table
            for at in beneath:
                if group[0][at].plain:
                    yield _indented(_labelled(self.columns[at].name, group[0][at]))

    def _stacked(self, texts: list[list[Text]], shown: list[int]) -> Iterator[Text | Padding]:
        keys = [at for at in shown if self.columns[at].key]
        others = [at for at in shown if not self.columns[at].key]
        for row in texts:
            if keys:
                yield Text(", ").join(row[at] for at in keys if row[at].plain)
            filled = [at for at in others if row[at].plain]
            facts = [at for at in filled if not self.columns[at].long]
            pairs = (_labelled(self.columns[at].name, row[at]) for at in facts)
            yield _indented(Text(", ").join(pairs))
            for at in filled:
                if self.columns[at].long:
                    yield _indented(_labelled(self.columns[at].name, row[at]))


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _widest(name: str, cells: Iterable[Text]) -> int:
    return max((Text(name).cell_len, *(cell.cell_len for cell in cells)))


def _width(columns: Sequence[Column], texts: list[list[Text]], beside: list[int]) -> int:
    return sum(_widest(columns[at].name, (row[at] for row in texts)) + _GAP for at in beside) - _GAP


def _labelled(name: str, cell: Text) -> Text:
    return Text.assemble((f"{name} ", "dim"), cell)


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, _GAP))

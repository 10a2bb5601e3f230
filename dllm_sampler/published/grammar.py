"""The loop of grammar-constrained decoding as in its published LLaDA driver (arXiv 2508.10111)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.protocols import Context, Stop
from dllm_sampler.core.values import Canvas, Edit, Query, Readout, Refusals
from dllm_sampler.guides.grammar.guide import Grammar, Text
from dllm_sampler.guides.grammar.language import Language


@dataclass(frozen=True)
class PublishedGrammar(Grammar):
    """Grammar-constrained decoding that chooses the positions of a step again after each rejected token.

    It decodes one row. The scheduler only sets the number of tokens per step. After a rejection the position competes
    with its next best token, at temperature 0 with renormalised probabilities. An end-of-text token overwrites
    everything after it. The text may continue after the canvas. `tries` limits the rejections of the whole generation,
    and the row ends when it is reached.

    Args:
        known, texts_of, ending: the values of `language`, `tokens` and `ends`, from a bound `Grammar`.
        before: the last tokens of the prompt that are part of the text.
        greedy: true if the run has temperature 0.
        decisions: gets the forward, the position in the answer, the token and the verdict of each candidate.
    """

    known: Language | None = None
    texts_of: tuple[bytes, ...] = ()
    ending: frozenset[int] = frozenset()
    before: tuple[int, ...] = ()
    greedy: bool = True
    decisions: list[list[int | bool]] = field(default_factory=list)

    def bind(self, context: Context) -> PublishedGrammar:
        """Set the language, the tokens and the end-of-text tokens from the arguments, and return this guide."""
        vars(self).update(language=self.known, tokens=self.texts_of, ends=self.ending)
        return self

    @override
    def texts(self, canvas: Canvas) -> Iterator[Text]:
        for text in super().texts(canvas):
            tail = [self.word(token) for token in self.before]
            yield Text(text.row, text.first - len(tail), tail + text.words, [])

    def fits(self, text: Text, column: int, token: int) -> bool:
        """Return True if `token` may be at `column`, even if its text is empty."""
        assert self.language is not None
        return self.language.feasible(text.written(column, self.word(token)))

    @override
    def settle(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> tuple[Edit, Refusals]:
        assert readout.draw is not None and readout.logits is not None
        refused, stuck = torch.zeros_like(canvas.step), torch.zeros_like(canvas.done)
        text = next(self.texts(canvas), None)
        if text is None:
            return edit, Refusals(refused, stuck)
        columns, first = query.positions[0].tolist(), int(canvas.layout.first[0])
        places = torch.where(canvas.eligible(query.positions)[0])[0]
        best = readout.draw.scores(readout.draw.logits)[0, 0, places].double()  # [P, V]
        plain = best if self.greedy else readout.logits[0, 0, places].double()
        ids, commit = edit.ids.clone(), torch.zeros_like(edit.commit)
        left, open_ = int(edit.commit.sum()), torch.ones(len(places), dtype=torch.bool)
        complete = False
        while left and not complete:
            tokens = best.argmax(-1)
            sure = torch.softmax(plain, -1).gather(1, tokens[:, None])[:, 0].masked_fill(~open_, -torch.inf)
            place = int(sure.argmax())
            token = int(tokens[place])
            if best[place, token] == -torch.inf or not bool(open_.any()):
                stuck[0] = True
                break
            at = int(places[place])
            fits = self.fits(text, columns[at], token)
            self.decisions.append([int(canvas.step[0]), columns[at] - first, token, fits])
            if not fits:
                best[place, token] = -torch.inf
                refused[0] += 1
                if sum(not decision[3] for decision in self.decisions) >= self.tries:
                    stuck[0] = True
                    break
                continue
            left, open_[place] = left - 1, False
            for later in range(at, len(columns) if token in self.ending else at + 1):
                if columns[later] < canvas.length:
                    text.write(columns[later], self.word(token))
                    ids[0, later], commit[0, later] = token, True
                    open_ &= places != later
            first_other = next((word for word in text.words if not isinstance(word, bytes)), None)
            complete = first_other is not None  # an end-of-text token comes before the first mask
        finish = torch.full_like(canvas.done, complete)
        return replace(edit, ids=ids, commit=commit, finish=finish), Refusals(refused, stuck)


@dataclass(frozen=True)
class Behind(Stop):
    """A stop that ends no row. It queries all positions but given ones, for what `PublishedGrammar` writes later."""

    @override
    def positions(self, canvas: Canvas) -> Tensor:
        return canvas.seen() & ~canvas.layout.frozen

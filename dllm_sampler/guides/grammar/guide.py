"""The guide on a context-free grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from dllm_sampler.core.checks import check_count
from dllm_sampler.core.protocols import Context, Guide
from dllm_sampler.core.spec import ModelSpec, with_bound_fields
from dllm_sampler.core.values import FREE, Canvas, Edit, Query, Readout, Refusals
from dllm_sampler.errors import UserError, as_typed, short
from dllm_sampler.guides.forms.automaton import Automaton, Recipe, lifted
from dllm_sampler.guides.forms.regular import Form
from dllm_sampler.guides.forms.tokens import token_bytes
from dllm_sampler.guides.grammar.filling import Filling
from dllm_sampler.guides.grammar.language import Language
from dllm_sampler.guides.grammar.partial import END, Word


@dataclass(frozen=True)
class Grammar(Guide):
    """Answers of a context-free language. A token is committed only if some text of the language has it there.

    The tokens that a scheduler wants to commit are tested one by one, the surest first, against the text so far. Each
    run of masks in it may become any text. Tokens that fail are not committed. If all of them fail, the surest other
    token of the block that fits is committed instead, so that every step makes progress. A row ends after `tries`
    failed tokens, with `finish_reason` "constraint". If a token failed, or the rest could not be completed, nothing is
    remasked.

    The number of masks in a gap is not considered, so an answer may run out of them. If the grammar is regular, or
    with a `depth`, tokens are chosen together instead, as by `guide=regex`. Then every answer that comes to its end is
    of the language, and `tries` and `complete`, which have no effect then, are refused.

    Source: arXiv 2508.10111, which tests tokens one after the other until as many fit as the schedule wants.

    Args:
        grammar: a file (docs/grammars.md), or one that is shipped: json, arithmetic, smiles.
        depth: most levels of recursion inside an answer, as `Language.automaton` counts them. By default any number.
        tries: most tokens that may fail in a step of a row before it ends.
        complete: before a row ends, fill its block by a completion that has exactly the remaining masks
            (`filling.Filling`).
    """

    vetoes: ClassVar[bool] = True

    grammar: str = ""
    depth: int | None = None
    tries: int = 100
    complete: bool = False

    language: Language | None = field(init=False, default=None, repr=False, compare=False)
    tokens: tuple[bytes, ...] = field(init=False, default=(), repr=False, compare=False)  # of each id
    ends: frozenset[int] = field(init=False, default=frozenset(), repr=False, compare=False)
    filling: Filling | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("guide.grammar.depth", self.depth, 0, optional=True)
        check_count("guide.grammar.tries", self.tries)
        if not isinstance(self.grammar, str):
            raise UserError(
                "option-type",
                f"guide.grammar.grammar={as_typed(self.grammar)} is not a text. Give the path of a file as a text,"
                " or a packaged grammar, for example json.",
            )

    @property
    @override
    def chooses(self) -> bool:
        return False

    @override
    def bind(self, context: Context) -> Guide:
        spec = context.spec
        if context.tokenizer is None:
            raise UserError(
                "tokenizer-missing",
                "guide=grammar needs a tokenizer, and this model has none. Pass one to Sampler, or remove the guide.",
            )
        if not self.grammar:
            raise UserError("option-missing", "guide=grammar has no grammar. Set guide.grammar.grammar=FILE or json.")
        language = Language.load(self.grammar)
        if self.depth is not None or language.regular:
            idle = "complete" if self.complete else "tries" if self.tries != type(self).tries else None
            if idle is not None:
                raise UserError(
                    "option-not-applicable",
                    f"guide.grammar.{idle}={as_typed(getattr(self, idle))} has no effect with a depth or on a regular"
                    " grammar, since tokens are chosen together. Remove it.",
                )
            return BoundedGrammar(language, self.depth).bind(context)
        if spec.mask_id is None:
            raise UserError(
                "mask-token-missing",
                "guide=grammar without a depth needs a model with a mask token. Set guide.grammar.depth=N.",
            )
        ends = frozenset(spec.eos_ids)  # texts end at these. An end of turn has no text
        tokens = tuple(token_bytes(context.tokenizer))
        never = {*ends, spec.mask_id}
        known = [(text, token) for token, text in enumerate(tokens[: spec.vocab_size]) if text and token not in never]
        filling = Filling(language, dict(reversed(known)), spec.eos_id) if self.complete else None
        return with_bound_fields(self, language=language, tokens=tokens, ends=ends, filling=filling)

    @override
    def settle(self, canvas: Canvas, query: Query, readout: Readout, edit: Edit) -> tuple[Edit, Refusals]:
        sure = readout.confidence[:, 0] if edit.confidence is None else edit.confidence
        ids, commit, settled = edit.ids.clone(), edit.commit.clone(), sure.clone()
        refused, stuck = torch.zeros_like(canvas.step), torch.zeros_like(canvas.done)
        remask = None if edit.remask is None else edit.remask.clone()
        assert readout.draw is not None and readout.logits is not None
        scores: Tensor | None = None  # computed when a row needs them
        every = Wanted.of(canvas, query, edit, sure)
        for text in self.texts(canvas):
            row = text.row
            wanted = every[row]
            kept = 0
            for at in wanted.commits:
                column, token = wanted.columns[at], wanted.ids[at]
                if self.fits(text, column, token):
                    text.write(column, self.word(token))
                    kept += at in wanted.masks
                else:
                    commit[row, at] = False
                    refused[row] += 1
            # A scheduler remasks fewer tokens than it commits, but some are refused. After an end-of-text token all is
            # allowed.
            if remask is not None and (refused[row] or not self._opens(text, wanted, remask[row])):
                remask[row] = False
            if kept or not any(at in wanted.masks for at in wanted.commits):
                continue
            found = None
            scores = readout.draw.scores(readout.draw.logits) if scores is None else scores
            for tried, (at, token, confidence) in enumerate(surest(row, wanted, scores, readout.logits)):
                if tried == self.tries:
                    break
                if self.fits(text, wanted.columns[at], token):
                    found = at, token, confidence
                    break
                refused[row] += 1
            chosen = [] if found is None else [found]
            if found is None:
                chosen = self._filled(text, wanted, readout.logits)
            stuck[row] = not chosen
            for at, token, confidence in chosen:
                ids[row, at], commit[row, at], settled[row, at] = token, True, confidence
        edit = replace(edit, ids=ids, commit=commit, remask=remask, confidence=settled)
        return edit, Refusals(refused, stuck)

    def _opens(self, text: Text, wanted: Wanted, remask: Tensor) -> bool:
        """Return True if a text can be completed after the places `remask [Q] bool` of the query are remasked."""
        assert self.language is not None
        words, taken = [*text.words, *text.rest], [at for at, back in enumerate(remask.tolist()) if back]
        for at in taken:
            place = wanted.columns[at] - text.first
            if 0 <= place < len(text.words):
                words[place] = None
        return not taken or self.language.feasible(words)

    def _filled(self, text: Text, wanted: Wanted, logits: Tensor) -> list[tuple[int, int, float]]:
        """Return place in the query, token and probability at the masks of a row's block, by a completion."""
        tokens = None if self.filling is None else self.filling([*text.words, *text.rest])
        if tokens is None:
            return []
        masks = [text.first + at for at, word in enumerate(text.words) if word is None]
        token_at = dict(zip(masks, tokens, strict=True))
        found = []
        for at in sorted(wanted.masks):
            token = token_at[wanted.columns[at]]
            found.append((at, token, float(torch.softmax(logits[text.row, 0, at].double(), -1)[token])))
        return found

    @override
    def check_answer(self, given: Sequence[int], form: int = 0) -> None:
        assert self.language is not None
        words = [None if token == FREE else self.word(token) for token in given]
        if any(words) and not self.language.feasible([*words, END]):
            raise UserError(
                "form-impossible",
                "guide=grammar: no text of the grammar has the given tokens. Change the grammar or the tokens.",
            )

    @override
    def valid(self, tokens: Sequence[int], form: int = 0) -> bool:
        assert self.language is not None
        return self.language.feasible([*map(self.word, tokens), END])

    def texts(self, canvas: Canvas) -> Iterator[Text]:
        """Yield the present texts of rows that are not done."""
        ids = canvas.ids.masked_fill(canvas.masked, -1).tolist()
        ends = torch.stack([canvas.layout.first, canvas.end, canvas.done.long()], 1).tolist()
        for row, (first, end, done) in enumerate(ends):
            if not done:
                words = [None if token < 0 else self.word(token) for token in ids[row][first:end]]
                yield Text(row, first, words, [END])

    def word(self, token: int) -> Word:
        """Return the bytes that a token adds to a text, or `END`."""
        if token in self.ends:
            return END
        return self.tokens[token] if token < len(self.tokens) else b""

    def fits(self, text: Text, column: int, token: int) -> bool:
        """Return True if a text can still be completed with `token` at `column`. A token without a text never fits."""
        assert self.language is not None
        word = self.word(token)
        return word != b"" and self.language.feasible(text.written(column, word))


@dataclass(frozen=True)
class BoundedGrammar(Form):
    """Answers of a grammar that is regular, or whose derivations nest at most `depth` deep."""

    stands_for: ClassVar[type] = Grammar

    language: Language
    depth: int | None = None

    def __repr__(self) -> str:
        return f"BoundedGrammar(grammar={self.language.name!r}, depth={self.depth})"

    @override
    def typed_form(self, form: int) -> str:
        return f"guide.grammar.grammar={short(self.language.name)}"

    @override
    def build(self, tokens: Sequence[bytes], spec: ModelSpec) -> tuple[Automaton, ...]:
        made = self.language.automaton(self.depth)
        about = f"grammar {json.dumps(made)}"
        numbers = spec.vocab_size, spec.eos_ids, spec.mask_id
        return (lifted(Recipe(self.typed_form(0), about, lambda: made, tuple(tokens), *numbers)),)


@dataclass
class Text:
    """A row's answer, a word for each column. A mask is None."""

    row: int
    first: int  # column of its first word
    words: list[Word]
    rest: list[Word]  # words after the last column

    def write(self, column: int, word: Word) -> None:
        """Put a word at `column`."""
        self.words[column - self.first] = word

    def written(self, column: int, word: Word) -> list[Word]:
        """Return all words, with another one at `column`."""
        at = column - self.first
        return [*self.words[:at], word, *self.words[at + 1 :], *self.rest]


@dataclass(frozen=True)
class Wanted:
    """A scheduler's edit of one row. Numbers are places in the query."""

    columns: list[int]
    ids: list[int]
    commits: list[int]  # the surest first, without tokens that are decided already or remasked at once
    masks: set[int]  # noise of the block, which may be committed instead

    @staticmethod
    def of(canvas: Canvas, query: Query, edit: Edit, sure: Tensor) -> list[Wanted]:
        """Split an edit into rows, by one read of the device. `sure [B, Q]` is the confidence."""
        at = query.positions
        stays = edit.commit if edit.remask is None else edit.commit & ~edit.remask
        new = canvas.masked.gather(1, at) | (edit.ids != canvas.ids.gather(1, at))
        chosen = stays & new & ~canvas.layout.frozen.gather(1, at)
        order = sure.argsort(dim=1, descending=True, stable=True)
        told = torch.stack([at, edit.ids, order, chosen.long(), canvas.eligible(at).long()], 1).tolist()
        return [
            Wanted(columns, ids, [one for one in ranked if commits[one]], {n for n, free in enumerate(masks) if free})
            for columns, ids, ranked, commits, masks in told
        ]


def surest(row: int, wanted: Wanted, scores: Tensor, logits: Tensor) -> Iterator[tuple[int, int, float]]:
    """Yield tokens at the masks of a row, the surest place first: place in the query, token, its probability.

    After a token its place continues with the next best one. Tokens that the scheduler chose have failed already.

    Args:
        scores: `[B, 1, Q, V]`. A place's best token has the highest score.
        logits: `[B, 1, Q, V]` for the probabilities.
    """
    places = sorted(wanted.masks)
    at = torch.tensor(places, device=scores.device)
    scores, chance = scores[row, 0, at].double(), torch.softmax(logits[row, 0, at].double(), -1)  # [P, V]
    for one in set(wanted.commits) & wanted.masks:
        scores[places.index(one), wanted.ids[one]] = -torch.inf
    best, token = scores.max(-1)
    while True:
        own = chance.gather(1, token[:, None])[:, 0].masked_fill(best == -torch.inf, -1)
        place = int(own.argmax())
        if own[place] < 0:
            return
        yield places[place], int(token[place]), float(own[place])
        scores[place, token[place]] = -torch.inf
        best[place], token[place] = scores[place].max(-1)

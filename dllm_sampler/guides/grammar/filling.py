"""Tokens for the masks of a partial text, exactly as many as there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dllm_sampler.guides.grammar.completion import MASK, completion
from dllm_sampler.guides.grammar.language import Language
from dllm_sampler.guides.grammar.lattice import Lattice, Vocabulary
from dllm_sampler.guides.grammar.partial import END, End, Word

SHORT, STEPS = 100_000, 1_000_000  # most steps of the search for a shortest completion, and for any
AHEAD = 4  # see `completion`


@dataclass(frozen=True, eq=False)
class Filling:
    """Completions of partial texts, a token for each mask.

    Only one thread may use it at a time, since it remembers moves of tokens through lexemes.

    Args:
        language: the language of the full texts.
        ids: a token for each text that a token has.
        end_id: the end-of-text token.
    """

    language: Language
    ids: Mapping[bytes, int]
    end_id: int

    @cached_property
    def lattice(self) -> Lattice:
        """The language's lexemes over the tokens."""
        return Lattice(self.language.terminals, self.language.grammar, Vocabulary.of(self.ids))

    def __call__(self, words: Sequence[Word]) -> list[int] | None:
        """Return tokens for the masks among `words`, in their order, so that the whole is a text of the language.

        The text has the fewest bytes, letters and digits first, if it is found in `SHORT` steps. It ends at the first
        end-of-text token, which may replace a mask. From there on masks get end-of-text tokens. An end-of-text token
        before decided tokens is used only if nothing else is found.

        Args:
            words: the bytes of each position's token, None for a mask, or `END`.

        Returns:
            None if no such tokens are found in `STEPS` steps.
        """
        table, places = self.language.terminals.table, list[int]()
        for word in words:
            if isinstance(word, End):
                break
            if word is None:
                places.append(MASK)
            else:
                places += word.translate(table)
        found = None
        if self.language.feasible([*words, END]):
            found = completion(places, self.lattice, SHORT) or completion(places, self.lattice, STEPS, AHEAD)
        if found is None:
            found = completion(places, self.lattice, STEPS, AHEAD, early=True)
        if found is None:
            return None
        tokens = [self.lattice.vocabulary.ids[text] for _, text in found]
        return tokens + [self.end_id] * (sum(word is None for word in words) - len(tokens))

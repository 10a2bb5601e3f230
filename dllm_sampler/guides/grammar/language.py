"""A context-free language over bytes: recognition and completion of texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from dllm_sampler.errors import UserError, short
from dllm_sampler.guides.forms.automaton import ByteAutomaton
from dllm_sampler.guides.grammar.bounded import Nesting
from dllm_sampler.guides.grammar.bounded import automaton as bounded_automaton
from dllm_sampler.guides.grammar.completion import GAP, completion
from dllm_sampler.guides.grammar.emptiness import Emptiness
from dllm_sampler.guides.grammar.lattice import Lattice, Vocabulary
from dllm_sampler.guides.grammar.lexing import Scanner
from dllm_sampler.guides.grammar.partial import END, Partial, Word, graph
from dllm_sampler.guides.grammar.reading import Source, read
from dllm_sampler.guides.grammar.rules import normal
from dllm_sampler.guides.grammar.terminals import compiled

STEPS = 3_000_000  # most steps of the search for a completion
PRODUCTS = 5_000_000  # most products of sets of variables for one verdict
HELD = 1_000_000  # most remembered bytes of lexed texts, and most remembered products of the search
EXAMPLES = Path(__file__).with_name("examples")


class Language:
    """The texts of a grammar.

    Terminals are regular expressions, matched against whole lexemes. Bytes to skip may be before, between and after
    lexemes. All ways to split a text into lexemes are tried, not only the one with the longest lexemes. The text is in
    the language if the rules derive one of them.

    Results are remembered to save time. Only one thread may use a language at a time.

    Source: the decision is that of arXiv 2508.10111, with every split into lexemes instead of the longest matches.
    """

    def __init__(self, source: Source):
        self.name = source.name
        self.terminals = compiled(source.expressions, source.skip, source.prelex, source.places, source.name)
        try:
            self.grammar = normal(source.rules, source.start, self.terminals.possible, self.terminals.nullable)
        except UserError as error:
            raise UserError(error.code, f"{source.name}: {error}") from None
        self.forget()

    @staticmethod
    def parse(text: str, name: str) -> Language:
        """Return the language of a grammar in the format of `reading`.

        Args:
            text: the grammar.
            name: name in errors.

        Raises:
            UserError: a line is invalid. The message has the name and the line.
        """
        return Language(read(text, name))

    @staticmethod
    def load(name: str) -> Language:
        """Load the language of a file, or of a grammar that comes with the package (`json`, `arithmetic`, `smiles`).

        Raises:
            UserError: the file does not exist, or is not a grammar.
        """
        known = {file.stem: file for file in EXAMPLES.glob("*.grammar")}
        try:
            path = known.get(name) or Path(name).expanduser()
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise UserError(
                "file-unreadable",
                f"guide.grammar.grammar={short(name)} cannot be read ({reason}). Name a file, or one of"
                f" {', '.join(sorted(known))}.",
            ) from None
        return Language.parse(text, short(name))

    def forget(self) -> None:
        """Drop all remembered results."""
        self._scanner, self._search = Scanner(self.terminals, self.grammar), Emptiness(self.grammar, PRODUCTS)

    def feasible(self, words: Sequence[Word]) -> bool:
        """Return True if a partial text can be completed to one of the language.

        A run of masks may become any text, whatever its length. Words after the first end-of-text token are ignored.
        Without an end-of-text token any text may follow. An empty list is not feasible.

        A partial text that needs more than `PRODUCTS` steps counts as not feasible. True is never wrong.

        Args:
            words: the bytes of each position's token, None for a mask, or `END`.
        """
        if not words:
            return False
        if self._scanner.held > HELD or self._search.size() > HELD:
            self.forget()
        found = graph(Partial.of(words), self._scanner)
        return found is not None and self._search(found)

    def complete(self, words: Sequence[Word]) -> bytes | None:
        """Return a shortest text of the language that completes a partial text. See `feasible`.

        Returns:
            the full text, or None if none is found in `STEPS` steps.
        """
        if not words:
            return None
        partial = Partial.of(words)
        said = [b""] if partial.open else list[bytes]()  # of each place. An empty text is a gap
        for number, piece in enumerate(partial.pieces):
            said += [b""] * (number > 0) + [bytes([byte]) for byte in piece]
        said += [b""] * (not partial.closed and said[-1:] != [b""])
        table = self.terminals.table
        found = completion([table[one[0]] if one else GAP for one in said], self._bytes, STEPS)
        if found is None:
            return None
        for place, text in found:
            said[place] += self._bytes.vocabulary.texts[text]
        return b"".join(said)

    @cached_property
    def _bytes(self) -> Lattice:
        """The lexemes over single bytes."""
        return Lattice(self.terminals, self.grammar, Vocabulary.of({bytes([byte]): byte for byte in range(256)}))

    def accepts(self, text: bytes) -> bool:
        """Return True if a full text is in the language. See `feasible`."""
        return self.feasible([text, END])

    @property
    def regular(self) -> bool:
        """True if the rules are regular: no variable is inside itself with text on both sides."""
        return Nesting(self.grammar).variable is None

    def automaton(self, depth: int | None = None) -> ByteAutomaton:
        """Build the finite automaton over bytes of the language, or of its texts up to a depth.

        Args:
            depth: greatest depth of texts (see `bounded`). A regular language needs none.

        Returns:
            the first state, the final ones, and the next state by state and byte.

        Raises:
            UserError: the language is not regular and no depth is given, the depth is negative or no text has it, or
                the automaton is too large.
        """
        return bounded_automaton(self.grammar, self.terminals, depth, f"The grammar {self.name}")

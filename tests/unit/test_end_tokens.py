"""Every end-of-text token ends an answer, the model's own and the user's; stop strings; what is left of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dllm_sampler import Edit, Query, Readout, Result, Sampler
from dllm_sampler.cli.main import main
from dllm_sampler.core.ends import end_ids, first_end, is_end
from dllm_sampler.core.protocols import Stop
from dllm_sampler.generation.speculative import SpeculativeSampler
from dllm_sampler.guides.end_tokens import EndTokens
from dllm_sampler.guides.forms import automaton
from dllm_sampler.guides.forms.given import completable
from dllm_sampler.inputs.texts import cut, decode
from dllm_sampler.models.denoiser import TransformerDenoiser
from dllm_sampler.models.huggingface import wrap
from dllm_sampler.models.loading import load, load_tokenizer
from dllm_sampler.result import Speculation
from dllm_sampler.schedulers.rho_eos import RhoEos
from dllm_sampler.stops.end_of_text import EndOfText
from dllm_sampler.stops.end_tokens import BlockStop, PrefixStop, TruncateStop
from dllm_sampler.stops.fill import FillStop
from dllm_sampler.training.data import Encoder, Example
from dllm_sampler.training.trajectory import Trajectories
from tests import scripted, tiny, toys
from tests.refusals import refused
from tests.sampling import each, few

E, M, OTHER = toys.EOS, toys.MASK, 5
NEW = 12


def rows(result: Result | Speculation) -> list[list[int]]:
    """The tokens of each answer."""
    return [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths.tolist(), strict=True)]


def ending_at(*ends: int) -> TransformerDenoiser:
    """The toy with these end tokens."""
    made = toys.denoiser()
    assert isinstance(made, TransformerDenoiser)
    return replace(made, eos_id=ends)


def plain(**options: Any) -> Result:
    return toys.sampler().generate(toys.PROMPTS[:3], max_new_tokens=NEW, **options)


# What a model is told of its end tokens -------------------------------------------------------------------------------


def test_a_spec_has_one_end_token_or_several() -> None:
    spec = toys.denoiser().spec
    assert (spec.eos_id, spec.eos_ids) == (E, (E,))
    more = spec.with_ends((OTHER, E, 6))
    assert (more.eos_id, more.eos_ids) == (E, (E, OTHER, 6))
    assert replace(more, pad_id=3).eos_ids == (E, OTHER, 6) and more.with_ends(6) is more
    assert replace(spec, eos_id=OTHER).eos_ids == (OTHER,)
    several = ending_at(OTHER, E)
    assert several.spec.eos_ids == (OTHER, E) and replace(several, eos_id=E).spec.eos_ids == (E,)
    with refused("token-outside-vocabulary: eos_id, 999"):
        replace(several, eos_id=(E, 999))


def test_is_end() -> None:
    ids = torch.tensor([[1, E, OTHER, 6]])
    assert is_end(ids, (E, OTHER)).tolist() == [[False, True, True, False]]
    assert first_end([1, OTHER, E], (E, OTHER)) == 1 and first_end([1], (E,)) is None
    assert end_ids(3) == (3,) and end_ids([3, 1, 3]) == (3, 1)


@each(
    ("generation", "config", "expected"),
    [([7, 8], 9, (7, 8, 9)), (None, [9, 8], (9, 8)), (8, 8, (8,)), ([7], None, (7,)), (None, 9, (9,))],
)
def test_the_end_tokens_of_a_checkpoint(
    generation: Any, config: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    tmp_path = tiny.write("llada", tmp_path / "one")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    for file in tmp_path.glob("token*"):
        file.unlink()
    spec = load(tmp_path).denoiser.spec
    assert spec.eos_ids == expected and spec.eos_id == expected[0]


def test_the_tokenizer_adds_its_end_token(tmp_path: Path) -> None:
    tmp_path = tiny.write("llada", tmp_path / "one")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [OTHER]}))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": None}))
    assert load(tmp_path).denoiser.spec.eos_ids == (OTHER, raw["eos_token_id"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [OTHER, "x"]}))
    with refused("checkpoint-config-invalid: generation_config.json"):
        load(tmp_path)


def test_the_end_tokens_of_a_masked_lm() -> None:
    config = BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        eos_token_id=[4, 5],
    )
    config.mask_token_id, config.sep_token_id = 3, 6
    model = BertForMaskedLM(config).eval()
    assert wrap(model, None).spec.eos_ids == (4, 5)
    assert wrap(model, None, [7, 4]).spec.eos_ids == (7, 4, 5)
    model.config.eos_token_id = None
    assert wrap(model, None).spec.eos_ids == (6,), "BERT ends texts with its separator"


def test_the_end_tokens_of_diffusion_gemma() -> None:
    """The end of a turn is written where it is listed."""
    pytest.importorskip("transformers", "5.23")
    from dllm_sampler.models import diffusion_gemma

    text = SimpleNamespace(vocab_size=40, use_bidirectional_attention=None, eos_token_id=[1], pad_token_id=0)
    config = SimpleNamespace(text_config=text)
    model: Any = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=[1, 6, 8]), dtype=None)
    turn: Any = SimpleNamespace(get_vocab=lambda: {diffusion_gemma.END_OF_TURN: 6}, eos_token_id=2)
    assert diffusion_gemma.wrap(model, None).eos_id == (1, 6, 8)
    assert diffusion_gemma.wrap(model, turn).eos_id == (6, 1, 8, 2)


# The user's end tokens ------------------------------------------------------------------------------------------------


@few("stop", ["none", "prefix", "block", "truncate"])
def test_an_answer_ends_at_the_users_token(stop: str) -> None:
    """As it does at the model's own: the answers are those of a model that has these end tokens itself."""
    sampler = toys.sampler(stop=stop)
    whole = rows(toys.sampler().generate(toys.PROMPTS[:3], max_new_tokens=NEW))
    token = whole[0][3]
    first = whole[0].index(token)
    own = Sampler(ending_at(E, token), stop=stop, blocks=sampler.plugins.blocks)
    options: dict[str, Any] = {"max_new_tokens": NEW, "stop_token_ids": token}
    found = sampler.generate(toys.PROMPTS[:3], **options)
    expected = own.generate(toys.PROMPTS[:3], max_new_tokens=NEW)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.nfe, expected.nfe)
    assert found.finish_reason[0] == "end" and found.tokens[0, found.lengths[0] - 1] == token
    if stop != "truncate":  # no token before the end changes
        assert rows(found)[0] == whole[0][: first + 1]
    many = Result.stack(sampler.generate_many(toys.PROMPTS[:3], batch_size=2, **options))
    last = [*sampler.stream(toys.PROMPTS[:3], **options)][-1].result
    assert last is not None and torch.equal(last.tokens, found.tokens)
    assert torch.equal(many.tokens, found.tokens) and torch.equal(many.nfe, found.nfe)


def test_a_token_of_the_user_ends_the_forwards() -> None:
    whole = plain()
    token = rows(whole)[0][2]
    sampler = toys.sampler(stop="prefix", scheduler="leftright", stop_token_ids=[token])
    (answer,) = rows(sampler.generate(toys.PROMPTS[0], max_new_tokens=NEW))
    assert answer.index(token) == len(answer) - 1
    assert int(sampler.generate(toys.PROMPTS[0], max_new_tokens=NEW).nfe) == len(answer)


@each(
    ("given", "said"),
    [
        ("x", "option-type: stop_token_ids='x'"),
        ([True], "option-type: stop_token_ids"),
        ([1.5], "option-type: stop_token_ids"),
        (999, "token-outside-vocabulary: stop_token_ids, 999"),
        ([-1], "token-outside-vocabulary: -1"),
        (M, "mask-token-given"),
    ],
)
def test_wrong_tokens_of_the_user(given: Any, said: str) -> None:
    with refused(said):
        toys.sampler(stop_token_ids=given)


def test_the_command_takes_tokens_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Sampler.from_pretrained("mini", device="cpu").tokenizer
    assert tokenizer is not None
    token = tokenizer.convert_tokens_to_ids("Ben")
    words = ["device=cpu", "block_length=8", "copy: Ada, Ben, Cal"]
    for given, text in ((f"[{token}]", "Ada, "), (str(token), "Ada, "), ("null", "Ada, Ben, Cal")):
        assert main([*words, f"stop_token_ids={given}"]) == 0
        assert capsys.readouterr().out == f"{text}\n"
    assert main([*words, "stop_token_ids=[x]"]) == 2
    assert "stop_token_ids=['x'] is invalid" in capsys.readouterr().err


def test_none_is_no_token_of_the_user() -> None:
    assert toys.sampler(stop_token_ids=None).spec.eos_ids == (E,)
    for given in (np.int64(OTHER), [np.int64(OTHER)], [torch.tensor(OTHER)], {OTHER}, range(OTHER, OTHER + 1)):
        assert toys.sampler(stop_token_ids=given).spec.eos_ids == (E, OTHER)
    assert toys.sampler(stop_token_ids=torch.tensor([OTHER])).using(temperature=1.0).spec.eos_ids == (E, OTHER)


# What looks at end tokens ---------------------------------------------------------------------------------------------

CONTEXT = replace(toys.context(), spec=toys.denoiser().spec.with_ends(OTHER))


def canvas(ids: list[int]) -> Any:
    row = torch.tensor([ids])
    return replace(toys.canvas(row == M), ids=torch.tensor([[*ids, 0]]))


def stopped(stop: Stop, ids: list[int]) -> tuple[Any, Edit]:
    """What a stop makes of a canvas on which a step commits nothing."""
    it = canvas(ids)
    at = torch.arange(it.length)[None]
    edit = Edit(it.ids[:, :-1], torch.zeros(1, it.length, dtype=torch.bool), confidence=torch.ones(1, it.length))
    found = stop.bind(CONTEXT)(it, it, Query.at(it, at), None, edit)  # type: ignore[arg-type]
    return it.apply(at, found), found


@each("token", [E, OTHER])
@each("stop", [PrefixStop(), BlockStop(), FillStop()])
def test_stops_end_a_row_at_each_end_token(stop: Stop, token: int) -> None:
    assert stopped(stop, [1, token, 3, 4])[1].finish.tolist() == [True]  # type: ignore[union-attr]
    assert stopped(stop, [1, 2, 3, 4])[1].finish.tolist() == [False]  # type: ignore[union-attr]


@each("stop", [TruncateStop(), EndOfText()])
def test_stops_cut_behind_each_end_token(stop: Stop) -> None:
    assert stopped(stop, [M, OTHER, 3, E])[0].end.tolist() == [2]


def test_what_is_filled_is_the_first_end_token() -> None:
    after, _ = stopped(FillStop(), [1, OTHER, 3, OTHER, M])
    assert after.ids[0, :5].tolist() == [1, OTHER, E, OTHER, E]


def test_a_ban_is_of_all_end_tokens() -> None:
    logits, bound = torch.zeros(1, toys.VOCAB), EndTokens().bind(CONTEXT)
    assert bound(logits, None, None)[0].isinf().nonzero()[:, 0].tolist() == sorted((E, OTHER))  # type: ignore[arg-type]


def test_no_gap_before_given_tokens_has_an_end_token() -> None:
    """Of all tokens but one that the model would choose there, each is an end token."""
    ends = [token for token in range(toys.VOCAB) if token not in (M, 11)]
    found = toys.sampler(stop_token_ids=ends).generate(toys.PROMPTS[0], max_new_tokens=4, suffix=[11])
    assert found.trace.decoded.tolist() == [[11, 11, 11, 11]]
    with refused("given-conflict"):
        toys.sampler(stop_token_ids=OTHER).generate(toys.PROMPTS[0], max_new_tokens=4, prefix=[OTHER])


def test_eoser_holds_all_end_tokens_back() -> None:
    """The surest position is of an end token of the user's, and is committed last."""
    model, orders = scripted.constant([0.9, 0.5, 0.4], [1, 2, 3]), []
    for more in (None, 1):
        scheduler = {"name": "eoser", "low": 0.1, "high": 0.1, "inner": {"name": "fixed", "steps": 3}}
        made = Sampler(model, scheduler=scheduler, blocks="full", stop="none", stop_token_ids=more)
        orders.append(made.generate([[0]], max_new_tokens=3).trace.steps(0))
    assert orders == [[[0], [1], [2]], [[1], [2], [0]]]


def test_lengths_are_found_by_all_end_tokens() -> None:
    token = torch.tensor([[[OTHER, 1, E, 2]]])
    readout = Readout(token, torch.full(token.shape, 0.5, dtype=torch.float64))
    it = canvas([M, M, M, M])
    ends, _ = RhoEos().bind(CONTEXT).ends(it, Query.at(it, torch.arange(4)[None]), readout)
    assert ends.tolist() == [[True, False, True, False]]


def test_a_form_may_end_with_each_end_token() -> None:
    tokens = [b"a", b"b", b"", b"", b""]
    made = automaton.build_all(["ab*"], tokens, 5, (2, 1), 4)[0]
    assert made.accepted([0, 2, 3]) and made.accepted([0, 1, 0]), "an end token is no text"
    assert not made.accepted([2]) and not made.accepted([1])
    assert completable(made, [0, 1, 0], (2, 1)), "behind an end token anything may stand"
    assert not completable(made, [0, -1, 0], (2, 1)), "a gap before given tokens has none of them"


def test_a_grammar_ends_with_each_end_token() -> None:
    found = toys.sampler(guide={"name": "regex", "pattern": "[ab]{2}"}, stop_token_ids=[toys.SIGNS.index("c")])
    end = found.spec.eos_ids[1]
    for row in rows(found.generate(toys.PROMPTS[:3], max_new_tokens=NEW, temperature=1.0)):
        at = first_end(row, (E, end))
        text = toys.tokenizer().decode(row[:at])
        assert len(text) == 2 and set(text) <= {"a", "b"}


def test_a_verified_answer_ends_at_the_users_token() -> None:
    target = toys.verifier()
    plain = SpeculativeSampler(toys.sampler(), target).generate(toys.PROMPTS[0], max_new_tokens=NEW)
    whole = rows(plain)[0]
    deer = SpeculativeSampler(toys.sampler(stop_token_ids=whole[2]), target)
    found = deer.generate(toys.PROMPTS[0], max_new_tokens=NEW)
    assert rows(found) == [whole[: whole.index(whole[2]) + 1]]
    text = str(toys.tokenizer().decode(whole[2:]))[:1]
    cut_off = SpeculativeSampler(toys.sampler(), target).generate(
        toys.PROMPTS[0], max_new_tokens=NEW, stop_strings=text
    )
    assert cut_off.texts is not None and text not in cut_off.texts[0]
    assert cut_off.texts == [toys.tokenizer().decode(rows(cut_off)[0])]
    assert cut_off.tokens[0, cut_off.lengths[0] :].eq(E).all(), "padding"


def test_training_counts_up_to_each_end_token() -> None:
    trace = toys.sampler(entropy=True).generate(toys.PROMPTS[0], max_new_tokens=6).trace
    ids = torch.cat([trace.ids[:, : trace.origin], torch.tensor([[1, 2, OTHER, 3, E, 4]])], 1)
    trace = replace(trace, ids=ids)
    spec = toys.denoiser().spec
    assert Trajectories(trace, spec.with_ends(OTHER)).valid[0, trace.origin :].tolist() == [True] * 3 + [False] * 3
    assert Trajectories(trace, spec).valid[0, trace.origin :].tolist() == [True] * 5 + [False]


def test_examples_end_once(tmp_path: Path) -> None:
    """A chat template may have written the end of a turn."""
    folder = tiny.write("llada", tmp_path / "one")
    tokenizer, spec = load_tokenizer(folder), load(folder).denoiser.spec
    assert tokenizer is not None
    last = tokenizer.convert_tokens_to_ids("d")
    for known, end in ((spec, spec.eos_id), (spec.with_ends(last), last)):
        _, answer = Encoder(tokenizer, known)(Example("it", "ab", "cd"))
        assert answer[-1] == end and (spec.eos_id in answer) == (end == spec.eos_id)


# Stop strings ---------------------------------------------------------------------------------------------------------


def words(special: tuple[str, ...] = ("<end>", "<turn>")) -> PreTrainedTokenizerFast:
    """Tokens `w0` to `w9` with spaces between, and special ones."""
    names = {f"w{one}": one for one in range(10)} | {name: 10 + at for at, name in enumerate(special)}
    made = Tokenizer(WordLevel(names, unk_token="w0"))
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def letters() -> tuple[PreTrainedTokenizerFast, Callable[[str], list[int]]]:
    """A tokenizer of bytes, and some longer pieces."""
    signs = bytes_to_unicode()
    vocab = {sign: byte for byte, sign in signs.items()} | {"ab": 256, "<turn>": 257}
    made = Tokenizer(BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<turn>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made), lambda text: [*text.encode()]


def test_a_stop_string_may_be_a_special_token() -> None:
    tokenizer = words()
    row = [1, 2, 11, 3, 11]
    assert cut([row], tokenizer, ["<turn>"]) == [("w1 w2", 2, True)]
    assert cut([row], tokenizer, ["w3"]) == [("w1 w2 ", 3, True)], "of w3 the text has white space alone"
    assert cut([row], tokenizer, ["turn>"]) == [("w1 w2", 3, True)], "a part of one: it is cut, and shows nothing"
    assert cut([row], tokenizer, ["<turn>"], [3]) == [("w1 w2 w3", 4, True)], "not among the first tokens"
    assert cut([row], tokenizer, ["w9"]) == [("w1 w2 w3", 5, False)]
    assert cut([row], tokenizer, ["w1"]) == [("", 0, True)]


def test_what_a_stop_string_leaves_of_tokens() -> None:
    tokenizer, ids = letters()
    assert cut([ids("xéy\n\nz")], tokenizer, ["\n\n"]) == [("xéy", 4, True)], "two tokens are one sign"
    assert cut([[120, 256, 99]], tokenizer, ["bc"]) == [("xa", 2, True)], "the token holds text and stop string"
    assert cut([ids("x\n\n#")], tokenizer, ["#"]) == [("x\n\n", 3, True)], "white space counts where it is a token"
    assert cut([[*ids("é"), 257, 120]], tokenizer, ["<turn>"]) == [("é", 2, True)]
    assert cut([ids("é")], tokenizer, [chr(0xFFFD)]) == [("é", 2, False)], "a part of a sign is none"


def test_generations_end_at_a_special_token() -> None:
    """In `generate`, `generate_many` and `stream`: the forwards end there, and the text is cut."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "scheduler": "leftright"}
    whole = rows(toys.sampler().generate(toys.PROMPTS[0], **options))[0]
    at = next(at for at in range(2, NEW) if whole[at] not in (*whole[:at], E))
    names = {f"w{one}": one for one in range(toys.VOCAB) if one != whole[at]} | {"<turn>": whole[at]}
    made = Tokenizer(WordLevel(names, unk_token="w0"))
    made.add_special_tokens([AddedToken("<turn>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    sampler, options = toys.sampler(tokenizer=tokenizer), {**options, "stop_strings": "<turn>"}
    found = sampler.generate(toys.PROMPTS[0], **options)
    last = [*sampler.stream(toys.PROMPTS[0], **options)][-1].result
    (answer,) = sampler.generate_many(toys.PROMPTS[:1], **options)
    assert last is not None and found.texts == last.texts == [answer.text] == [tokenizer.decode(whole[:at])]
    assert [*found.finish_reason, *last.finish_reason, answer.finish_reason] == ["stop_string"] * 3
    assert rows(found) == rows(last) == [whole[:at]] == [answer.tokens[: answer.length].tolist()]
    assert int(found.nfe) == int(last.nfe) == answer.nfe == at + 1


def test_the_last_gap_ends_at_a_special_token() -> None:
    tokenizer = words(("<end>", "<turn>"))
    assert decode([[3, 11, 4]], tokenizer, ["<turn>"]) == ["w3"] and decode([[3, 11, 4]], tokenizer, ()) == ["w3 w4"]


# What is left of an answer --------------------------------------------------------------------------------------------


@each("stop", ["none", "prefix"])
def test_behind_the_end_there_is_padding(stop: str) -> None:
    """The trace keeps what was decoded there."""
    whole = plain()
    token = rows(whole)[0][4]
    sampler = toys.sampler(stop=stop, stop_token_ids=token)
    found = sampler.generate(toys.PROMPTS[:3], max_new_tokens=NEW)
    many = [*sampler.generate_many(toys.PROMPTS[:3], max_new_tokens=NEW, batch_size=2, order="given")]
    for row, answer in enumerate(many):
        length = int(found.lengths[row])
        assert found.tokens[row, length:].eq(sampler.spec.pad_id).all()
        assert torch.equal(answer.tokens, found.tokens[row]) and answer.length == length
    if stop == "none":
        assert torch.equal(found.trace.decoded, whole.trace.decoded)
        assert not torch.equal(found.tokens, found.trace.decoded)


def test_lengths_count_what_a_stop_string_leaves() -> None:
    whole = plain()
    assert whole.texts is not None
    text = whole.texts[0]
    sampler, tokenizer = toys.sampler(), toys.tokenizer()
    found = sampler.generate(toys.PROMPTS[:3], max_new_tokens=NEW, stop_strings=text[5:8])
    assert found.texts is not None and found.finish_reason[0] == "stop_string"
    for row, kept in enumerate(found.texts):
        said = str(tokenizer.decode(rows(found)[row], skip_special_tokens=True))
        assert said.startswith(kept) and len(tokenizer.decode(rows(found)[row][:-1])) < max(1, len(kept))
        assert found.tokens[row, found.lengths[row] :].eq(sampler.spec.pad_id).all()
    assert int(found.lengths[0]) < int(whole.lengths[0])
    assert torch.equal(found.generated, found.lengths), "tokens per forward count these"

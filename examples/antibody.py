"""A real model in five minutes: an antibody language model fills 32 hidden residues of known heavy chains.

    pip install --no-deps --target antiberty antiberty==0.1.3
    python examples/antibody.py --package antiberty --output antibody

AntiBERTy (26M parameters, MIT licence, arXiv 2112.07782) is a BERT whose tokens are residues. Its weights are in
the package as a pickle. The pickle is converted here, once, with `weights_only=True`: dllm_sampler itself reads
safetensors only. The program writes OUTPUT/model, prints the share of residues recovered and the forwards for five
schedulers, and draws OUTPUT/antibody.png.

It shows what parallel decoding does to a trained model on real data. It does not show caches (a BERT computes the whole
chain each time), long answers, or models of billions of parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from dllm_sampler import Sampler

GAP = 32
WEIGHTS = Path("antiberty", "trained_models", "AntiBERTy_md_smooth", "pytorch_model.bin")  # in the package
# Heavy-chain variable domains of approved antibodies.
CHAINS = {
    "trastuzumab": (
        "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRY"
        "ADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
    ),
    "adalimumab": (
        "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDY"
        "ADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVS"
        "S"
    ),
    "bevacizumab": (
        "EVQLVESGGGLVQPGGSLRLSCAASGYTFTNYGMNWVRQAPGKGLEWVGWINTYTGEPTY"
        "AADFKRRFTFSLDTSKSTAYLQMNSLRAEDTAVYYCAKYPHYYGSSHWYFDVWGQGTLVT"
        "VSS"
    ),
    "pembrolizumab": (
        "QVQLVQSGVEVKKPGASVKVSCKASGYTFTNYYMYWVRQAPGQGLEWMGGINPSNGGTNF"
        "NEKFKNRVTLTTDSSTTTAYMELKSLQFDDTAVYYCARRDYRFDMGFDYWGQGTTVTVSS"
    ),
}
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "fixed": [{"steps": steps} for steps in (32, 8, 4, 2, 1)],
    "threshold": [{"threshold": value} for value in (0.99, 0.9, 0.6)],
    "entropy": [{"entropy": value} for value in (0.1, 0.5, 1.5)],
    "factor": [{"factor": value} for value in (0.1, 0.5, 2.0)],
    "localleap": [{"threshold": one, "relaxed": low} for one, low in ((0.99, 0.9), (0.9, 0.75), (0.6, 0.4))],
}
Point = tuple[float, float, float]  # forwards, share recovered, share equal to one per step


def convert(package: Path, folder: Path) -> Path:
    """Write the weights of the installed package as a folder that dllm_sampler reads."""
    source = package / "antiberty" / "trained_models"
    weights = torch.load(package / WEIGHTS, map_location="cpu", weights_only=True)
    letters = (source / "vocab.txt").read_text().split()
    config = BertConfig(
        vocab_size=len(letters), hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    known = model.state_dict()
    missing, _ = model.load_state_dict({name: one for name, one in weights.items() if name in known}, strict=False)
    assert not [name for name in missing if "position_ids" not in name], missing
    model.save_pretrained(folder)
    made = Tokenizer(WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    begin, end = (("[CLS]", letters.index("[CLS]")), ("[SEP]", letters.index("[SEP]")))
    made.post_processor = processors.BertProcessing(end, begin)
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        pad_token="[PAD]",
    ).save_pretrained(folder)  # fmt: skip
    return folder


def windows() -> list[tuple[str, str]]:
    """Return two gaps of each chain, around its first and its third loop, and the residues that are missing."""
    found = []
    for chain in CHAINS.values():
        for first in (20, len(chain) - GAP - 6):
            found.append((f"{chain[:first]}{{gap:{GAP}}}{chain[first + GAP :]}", chain[first : first + GAP]))
    return found


def fill(
    sampler: Sampler, asked: Sequence[tuple[str, str]], scheduler: str, fields: dict[str, Any]
) -> tuple[float, str]:
    """Return the mean number of forwards, and the residues of all gaps, one after the other."""
    result = sampler.infill([text for text, _ in asked], scheduler={"name": scheduler, **fields})
    return float(result.nfe.double().mean()), "".join((gaps or [""])[0] for gaps in result.gaps or [])


def share(one: str, other: str) -> float:
    """Return the share of residues that are the same in two texts."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(other)


def draw(found: dict[str, list[Point]], file: Path, count: int) -> None:
    """Draw both shares against forwards, a line for each scheduler."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    for place, title, which in zip(axes, ("residues of the chain", "residues of one per step"), (1, 2), strict=True):
        for (name, points), marker in zip(found.items(), "os^Dv", strict=True):
            points = sorted(points)
            shares = [100 * point[which] for point in points]
            place.plot([point[0] for point in points], shares, marker=marker, markersize=4, linewidth=1.1, label=name)
        place.set_xscale("log", base=2)
        place.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        place.set_xlabel(f"forwards for {GAP} residues, mean of {count} gaps")
        place.set_ylabel(f"{title}, %")
        place.grid(color="0.9")
    axes[0].set_ylim(60, 90)  # two standard errors of a share of 256 residues are 5 points
    axes[1].legend(frameon=False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(words: list[str] | None = None) -> dict[str, list[Point]]:
    """Convert the model if that was not done, measure, draw, and return the points of each scheduler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=Path("antiberty"), help="folder of pip's --target")
    parser.add_argument("--output", type=Path, default=Path("antibody"))
    options = parser.parse_args(words)

    model = options.output / "model"
    if not (model / "config.json").exists():
        if not (options.package / WEIGHTS).is_file():
            parser.error(
                f"--package {options.package} has no weights. Run"
                f" `pip install --no-deps --target {options.package} antiberty==0.1.3`."
            )
        convert(options.package, model)
    sampler = Sampler.from_pretrained(
        str(model), blocks="full", stop="none", cache="none", dtype="float32", device="cpu"
    )
    asked = windows()
    truth = "".join(missing for _, missing in asked)
    plain, found = "", dict[str, list[Point]]()
    for scheduler, settings in SWEEPS.items():
        for fields in settings:
            forwards, filled = fill(sampler, asked, scheduler, fields)
            plain = plain or filled  # the first one is one per step
            point = forwards, share(filled, truth), share(filled, plain)
            found.setdefault(scheduler, []).append(point)
            said = f"{100 * point[1]:.1f} % of the chain's residues, {100 * point[2]:.1f} % of those of one per step"
            print(f"{scheduler} {fields}: {forwards:.1f} forwards, {said}", flush=True)
    draw(found, options.output / "antibody.png", len(asked))
    print(options.output / "antibody.png")
    return found


if __name__ == "__main__":
    main()

"""What every contract case gave when it was recorded: tokens, forwards and step map, in float64.

    python -m tests.contract.golden            # compare every case, and name those that differ
    python -m tests.contract.golden --write    # record them anew, and the new ones

A change that is not meant to change an answer must leave `golden.json` as it is. The commit message of one that is
meant to says why cases changed.
"""

from __future__ import annotations

import argparse
import json
import warnings
from typing import Any

from rich.progress import track

from dllm_sampler import UserError
from tests.contract.cases import CASES, GOLDEN, RECORDED


def main() -> int:
    """Compare or record. The exit status is 1 if a case differs from the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write golden.json")
    warnings.simplefilter("ignore")
    write, found, refused = parser.parse_args().write, dict[str, Any](), list[str]()
    for case in track(CASES, "cases", transient=True):
        try:
            found[case.id] = case.compute_record()
        except UserError as error:
            refused.append(f"{case.id}: {error}")
    changed = [name for name in found.keys() & RECORDED.keys() if found[name] != RECORDED[name]]
    new, gone = sorted(found.keys() - RECORDED.keys()), sorted(RECORDED.keys() - found.keys())
    for what, names in (("differs", sorted(changed)), ("new", new), ("gone", gone), ("refused", refused)):
        for name in names:
            print(f"{what}: {name}")
    print(f"{len(found)} cases: {len(changed)} differ, {len(new)} are new, {len(gone)} are gone")
    if write:
        lines = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}" for name, one in found.items()
        )
        GOLDEN.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return int(bool(not write and (changed or new or gone)))


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env bash
# What a GPU is to decide, in three parts of at most 10 minutes each. Run them in the repository's root:
#
#   bash benchmarks/gpu_hour.sh first OUT     # kernels against torch, a recording that fails; then what decides most
#   bash benchmarks/gpu_hour.sh second OUT    # the sampler on kernels and graphs; then heads, attention, other loops
#   bash benchmarks/gpu_hour.sh third OUT     # 8-bit weights, many prompts, drafts, tiles, compiled steps
#   bash benchmarks/gpu_hour.sh smoke OUT     # the benchmarks, tiny, on a CPU: do they run?
#
# OUT is a folder. It gets at most 8 files, renewed while a part runs, so a part that is stopped leaves them. A later
# part goes on with the results of an earlier one that are in OUT. Install the package with its extra `test` first. On a
# machine without network, WHEELS names a folder of wheels of what is missing there, and PYTHONPATH the repository.
set -u
part=${1:?first, second, third or smoke}
out=${2:?a folder for the results}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
work=$(mktemp -d)
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${WHEELS:-}" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$WHEELS"/*.whl || exit 2
  export PYTHONPATH=$work/site:$PYTHONPATH
fi
[ -f "$out/campaign.tgz" ] && tar xzf "$out/campaign.tgz" -C "$work"

keep() {
  [ -f "$work/campaign/campaign.json" ] || return 0
  cp "$work/campaign/campaign.json" "$out/"
  tar czf "$work/.tgz" -C "$work" campaign 2>/dev/null && mv "$work/.tgz" "$out/campaign.tgz"
}
(while sleep 5; do keep; done) & keeper=$!
trap 'keep; kill $keeper; rm -rf "$work"' EXIT

# Seconds from the start of the part at which its stages end; then their names.
stages() {
  local before=(); [ -f "$work/campaign/campaign.json" ] && before=(--continue)
  python3 benchmarks/campaign.py --out "$work/campaign" --minutes "$(python3 -c "print(max(1, ($1 - $SECONDS) / 60))")" \
    "${before[@]}" --only "$2"
}
# Seconds, file of what is printed, pytest's arguments; the failures are printed.
tests() {
  timeout -k 5 "$1" python3 -m pytest -p no:cacheprovider -q "${@:3}" > "$out/$2" 2>&1
  grep -E "^(FAILED|ERROR)|passed|failed|no tests ran" "$out/$2" | cut -c1-200 | tail -20
}
kernels() {
  timeout -k 5 "$1" python3 benchmarks/kernels.py --repeats 3 --json "$out/$2" "${@:3}" 2>&1 | tail -7
}

case $part in
first)
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit --format=csv
  python3 -c "import torch, triton, dllm_sampler.sampler; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())"
  # Alone in its process: a recording that fails must not spoil the next one.
  tests 60 recordings.txt -n0 tests/gpu/test_cuda_sampler.py -k come_and_go
  tests 130 kernels.txt -n 14 tests/gpu/test_cuda_kernels.py tests/gpu/test_layers.py
  stages 570 ceilings,step,uncached,products,timeline,batches
  ;;
second)
  tests 230 sampler.txt -n 14 tests/gpu/test_cuda_sampler.py tests/gpu/test_cuda.py \
    --deselect tests/gpu/test_cuda_sampler.py::test_recordings_come_and_go
  kernels 110 heads.json --only "64 x 4096 x 126464 greedy" --only "256 x 4096 x 126464 greedy"
  stages 570 batches,head,attention,dual,windows
  ;;
third)
  tests 60 int8.txt -n0 tests/gpu/test_cuda_sampler.py -k integers
  kernels 60 attention16.json --only "attention 16 x 32"
  stages 570 int8,windows,in_flight,drafts,tiles,compiled
  ;;
smoke)
  python3 benchmarks/campaign.py --smoke --out "$work/campaign"
  ;;
*)
  echo "first, second, third or smoke, not $part" >&2
  exit 2
  ;;
esac

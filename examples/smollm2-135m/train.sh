#!/usr/bin/env bash
# Trains the drafters of this folder: the target writes rows, then each drafter is trained on all of them.
#
#     bash examples/smollm2-135m/train.sh                              # all of them
#     DRAFTERS=eagle3 MINUTES=180 bash examples/smollm2-135m/train.sh  # one drafter
#     TARGET=my/assistant TAPS="1 11 21 30" MORE="--online --batch-size 64" bash ...   # another assistant, on a GPU
#
# A stopped run continues: rows by the file, a drafter from its last checkpoint. Drafters that are there are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

TAPS=${TAPS:-1 10 18 27}               # the same for all, so that they share the states on disk
CONVERSATIONS=${CONVERSATIONS:-80000}  # half of them about texts; SmolLM2 writes about 150 tokens of answers in each
MINUTES=${MINUTES:-60}                 # of each drafter's training
DRAFTERS=${DRAFTERS:-dflash dspark eagle3 specblock specbound draft-lm specbranch}
FOLDER=${FOLDER:-build/smollm2}
MORE=${MORE:---batch-size 16}          # further options of `hf-specdec train`
HERE=examples/smollm2-135m

mkdir -p "$FOLDER/rows" "$FOLDER/drafters"
card=()
if [ -z "${TARGET:-}" ]; then
    TARGET=$FOLDER/model
    card=(--target-id HuggingFaceTB/SmolLM2-135M-Instruct --license apache-2.0)
    ln -sfn "$(python examples/smollm2.py | tail -n 1)" "$TARGET"  # commands are in the cards: without paths of this machine
fi
[ -e "$FOLDER/texts.jsonl" ] || python $HERE/gather_texts.py "$FOLDER/texts.jsonl"

write() {  # name, seed, options
    python -m hf_specdec.cli write --target "$TARGET" --output "$FOLDER/rows/$1" --seed "$2" "${@:3}" \
        --questions $((CONVERSATIONS / 2)) --temperature 0 0 0.7 0.7 1 --follow-ups 0.33 --max-new-tokens 256 \
        --batch-size 96
}
write invented 0
write texts 1 --texts "$FOLDER/texts.jsonl"

train() {  # name, method, options
    local output=$FOLDER/drafters/$1 command
    if [[ " $DRAFTERS " != *" $1 "* || -e $output/training.json ]]; then return; fi
    command=(
        python -m hf_specdec.cli train --method "$2" --target "$TARGET" "${card[@]}"
        --data "$FOLDER"/rows/* --exclude $HERE/held_out.jsonl --validate $HERE/validation.jsonl
        --work-dir "$FOLDER/work" --minutes "$MINUTES" --draft-vocab-size 8000 --output "$output" "${@:3}" $MORE
    )
    # --resume fails with status 1 where there is no checkpoint of these options, before anything is loaded.
    "${command[@]}" --resume || { [ $? = 1 ] && "${command[@]}"; }
}
train dflash dflash --layers 3 --block-size 8 --taps $TAPS
train dspark dspark --layers 3 --block-size 7 --taps $TAPS
train eagle3 eagle3 --passes 4 --taps $TAPS
train specblock specblock --layers 2 --block-size 4 --blocks 3 --warm-start --slot-weights by_count --taps $TAPS
train specbound specbound --exit-layers 4 8 12 16 20 24 --head full
train draft-lm causal_lm --layers 4

if [[ " $DRAFTERS " == *" specbranch "* && ! -e $FOLDER/methods/specbranch/config.json ]]; then
    python examples/train_hrad.py --target "$TARGET" --draft-model "$FOLDER/drafters/draft-lm" --refer-to ../draft-lm \
        --data "$FOLDER/rows/invented" --new-tokens 96 --num-prompts 2000 --draft-length 4 --max-minutes "$MINUTES" \
        --output "$FOLDER/drafters/specbranch"
fi

#!/usr/bin/env bash
# (b) An AR server and one diffusion server. AR_GPUS=0,1 AR_TP=2 DIT_GPUS=2,3 DIT_SP=2 for two GPUs each.
. "$(dirname "$0")/common.sh"
ar_port=$((PORT + 100))
start_ar "${AR_GPUS:-}" "$ar_port" --tp-size "${AR_TP:-1}"
start "${DIT_GPUS:-}" sglang serve --model-path "$MODEL" --guidance-buckets 8 --port "$PORT" \
    --srt-encoder-url "http://127.0.0.1:$ar_port" \
    --num-gpus "${DIT_SP:-1}" --sp-degree "${DIT_SP:-1}" --ulysses-degree "${DIT_SP:-1}" "${diffusion_flags[@]}"
wait -n

#!/usr/bin/env bash
# (d) Several AR servers behind sglang-router, and one diffusion server. AR_GPUS="0 1" DIT_GPUS=2.
. "$(dirname "$0")/common.sh"
router_port=$((PORT + 100))
urls=()
for gpu in ${AR_GPUS:-any any}; do
    ar_port=$((PORT + 200 + 100 * ${#urls[@]}))
    start_ar "${gpu#any}" "$ar_port"
    urls+=("http://127.0.0.1:$ar_port")
done
for url in "${urls[@]}"; do wait_for "$url/health"; done
start "" python -m sglang_router.launch_router --worker-urls "${urls[@]}" --host 127.0.0.1 --port "$router_port" \
    --policy round_robin
start "${DIT_GPUS:-}" sglang serve --model-path "$MODEL" --guidance-buckets 8 --port "$PORT" \
    --srt-encoder-url "http://127.0.0.1:$router_port" "${diffusion_flags[@]}"
wait -n

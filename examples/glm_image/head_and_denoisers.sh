#!/usr/bin/env bash
# (c) An AR server, a head and one-device denoisers. AR_GPUS=0,1 AR_TP=2 DENOISER_GPUS="2 3 4" for three denoisers.
. "$(dirname "$0")/common.sh"
ar_port=$((PORT + 100)) head_port=$((PORT + 200))
start_ar "${AR_GPUS:-}" "$ar_port" --tp-size "${AR_TP:-1}"
urls=
index=0
for gpu in ${DENOISER_GPUS:-any any}; do
    work_port=$((PORT + 300 + 200 * index))
    start "${gpu#any}" sglang serve --model-path "$MODEL" --guidance-buckets 8 --disagg-role denoiser --num-gpus 1 \
        --disagg-server-addr "tcp://127.0.0.1:$head_port" --scheduler-port "$work_port" --master-port $((work_port + 50)) \
        --srt-encoder-url "http://127.0.0.1:$ar_port" "${diffusion_flags[@]}"
    urls+="tcp://127.0.0.1:$work_port;"
    index=$((index + 1))
done
start "" sglang serve --model-path "$MODEL" --guidance-buckets 8 --disagg-role server --denoiser-urls "$urls" \
    --port "$PORT" --scheduler-port "$head_port" --srt-encoder-url "http://127.0.0.1:$ar_port"
wait -n

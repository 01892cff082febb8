#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs in a machine: each script in /out/todo runs beside the others; /out/done/NAME gets its exit code.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONDONTWRITEBYTECODE=1
ulimit -l unlimited
ip link set lo up
cd /out || exit 1
: > ready
while :; do
    for script in todo/*.sh; do
        [ -e "$script" ] || continue
        name=$(basename "$script" .sh)
        mv "$script" "running/$name.sh"
        (
            code=0
            bash "running/$name.sh" > "said/$name" 2>&1 < /dev/null || code=$?
            echo "$code" > "done/$name.new"
            mv "done/$name.new" "done/$name"
        ) &
    done
    sleep 0.3
done

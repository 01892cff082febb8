#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Wait until a run has ended, whether it passed or failed: "kubectl wait --for=condition=Complete" waits on for a run
# that has failed. Ends with 0 if it is complete, 1 if it failed, 2 if kubectl cannot ask, and 124 if it did not end in
# time.
#
#   deploy/kubernetes/wait.sh job/nixl
#   TIMEOUT=1800 deploy/kubernetes/wait.sh jobset/nixl --namespace inference
#
# Further arguments go to kubectl. TIMEOUT is in seconds: longer than activeDeadlineSeconds and the wait for nodes.
set -euo pipefail
run=${1:?which run? give KIND/NAME, such as job/nixl}
shift
limit=${TIMEOUT:-7200}
refused=0
until [ "$SECONDS" -ge "$limit" ]; do
    # A Job, a JobSet and an MPIJob have one of these conditions once they have ended. An API server may be away for a
    # while, so ten requests in a row must fail.
    if conditions=$(kubectl get "$run" "$@" -o jsonpath='{.status.conditions[?(@.status=="True")].type}'); then
        refused=0
    elif [ $((refused += 1)) -ge 10 ]; then
        echo "$run: kubectl failed $refused times in a row" >&2
        exit 2
    fi
    case " $conditions " in
        *" Failed "*) echo "$run: failed"; exit 1 ;;
        *" Complete "* | *" Completed "* | *" Succeeded "*) echo "$run: complete"; exit 0 ;;
    esac
    sleep "${INTERVAL:-5}"
done
echo "$run: no end after $limit s" >&2
exit 124

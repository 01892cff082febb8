#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run with Open MPI's mpirun: one rank on each host. The exit code is that of the verdict. No etcd is needed, because
# rank 0 serves one on the first host.
#
#   HOSTS=node-a,node-b deploy/mpi/run.sh 2 --nixl-backend=LIBFABRIC --nixl-profile=p5.48xlarge \
#       --nixl-memory=VRAM:VRAM,DRAM:DRAM [option of pytest …]
#   deploy/mpi/run.sh 2                  # two ranks on this host with the profile loopback, as a first test
#
# RESULTS: a new directory on a file system that all hosts share, for the verdict, logs and JUnit XML of each rank
# (default: nixl-TIME in this directory). TIME_LIMIT: seconds after which the run is ended (default: 3600).
# MPIRUN_OPTIONS: more options of mpirun.
set -uo pipefail

ranks=${1:?the number of ranks is missing: run.sh RANKS [option of pytest ...]}
shift
hosts=${HOSTS:-}
# An absolute path, because the other hosts may have another PATH.
program=$(command -v pytest-nixl) || { echo "pytest-nixl: there is no pytest-nixl on PATH" >&2; exit 4; }
results=$(realpath -m "${RESULTS:-nixl-$(date +%Y%m%d-%H%M%S)}")
limit=${TIME_LIMIT:-3600}
if [ -e "$results" ]; then
    echo "pytest-nixl: $results already exists, and old verdicts would be counted: set RESULTS to a new directory" >&2
    exit 4
fi
mkdir -p "$results"

# The etcd of rank 0 accepts only clients that have this token.
export NIXL_GROUP_TOKEN=${NIXL_GROUP_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
# Rank 0 is on the first host.
first=${hosts%%,*}
first=${first%%:*}
export MASTER_ADDR=${MASTER_ADDR:-${first:-127.0.0.1}}

placed=(--map-by slot --oversubscribe)
[ -z "$hosts" ] || placed=(--host "$hosts" --map-by ppr:1:node)
# shellcheck disable=SC2206  # words are meant
more=(${MPIRUN_OPTIONS:-})
options=(
    -p no:cacheprovider --pyargs pytest_nixl.suites
    --nixl-gate
    --nixl-etcd-listen=0.0.0.0:23790
    --nixl-log-dir="$results" --junitxml="$results/junit.xml" --nixl-store="$results/store"
    --nixl-report="$results/report.html"
)

# mpirun kills the other ranks soon after one rank ends with a code other than 0. Therefore the ranks wait until all
# have written their reports before any of them ends. An option that makes mpirun spare them would make it exit with 0.
timeout --kill-after=60 "$limit" \
    mpirun -n "$ranks" "${placed[@]}" -x NIXL_GROUP_TOKEN -x MASTER_ADDR ${more[@]+"${more[@]}"} \
    "$program" run --as-given -- "${options[@]}" "$@"
code=$?

# Exit code 0 is accepted only if every rank has left a verdict.
verdicts=$(find "$results" -path "$results/rank-*/verdict.json" | wc -l)
if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
    echo "pytest-nixl: no end after $limit s (or killed): see $results" >&2
fi
if [ "$verdicts" -ne "$ranks" ]; then
    echo "pytest-nixl: $verdicts of $ranks ranks left a verdict in $results" >&2
    [ "$code" -ne 0 ] || code=1
fi
page=$results/report.html
[ -e "$page" ] && echo "pytest-nixl: next: open $page"
echo "pytest-nixl: exit code $code, results in $results"
exit "$code"

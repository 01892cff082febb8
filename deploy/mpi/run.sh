#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run by Open MPI's mpirun: one rank on each host, and the verdict as the exit code. No etcd is needed: rank 0 serves
# one on the first host.
#
#   HOSTS=node-a,node-b deploy/mpi/run.sh 2 --nixl-backend=LIBFABRIC --nixl-profile=p5.48xlarge \
#       --nixl-memory=VRAM:VRAM,DRAM:DRAM [option of pytest …]
#   deploy/mpi/run.sh 2                  # two ranks on this host, to see that it works: the profile is loopback
#
# RESULTS: a directory that all hosts share, for each rank's verdict, logs and JUnit XML (default: nixl-TIME, here).
# TIME_LIMIT: seconds after which it is ended (default: 3600). MPIRUN_OPTIONS: more options of mpirun.
set -uo pipefail

ranks=${1:?the number of ranks is missing: run.sh RANKS [option of pytest ...]}
shift
hosts=${HOSTS:-}
# The other hosts need not have this PATH.
pytest=$(command -v pytest) || { echo "pytest-nixl: there is no pytest on PATH" >&2; exit 4; }
results=$(realpath -m "${RESULTS:-nixl-$(date +%Y%m%d-%H%M%S)}")
limit=${TIME_LIMIT:-3600}
if [ -e "$results" ]; then
    echo "pytest-nixl: $results is there already, and old verdicts would count: give another RESULTS" >&2
    exit 4
fi
mkdir -p "$results"

# Who has no token cannot write into the etcd of rank 0.
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
)

# mpirun kills the other ranks soon after the first one has ended with another code than 0. So no rank ends before every
# rank has written its reports; what makes mpirun spare them would make it end with 0.
timeout --kill-after=60 "$limit" \
    mpirun -n "$ranks" "${placed[@]}" -x NIXL_GROUP_TOKEN -x MASTER_ADDR ${more[@]+"${more[@]}"} \
    "$pytest" "${options[@]}" "$@"
code=$?

# 0 counts only with a verdict of every rank.
verdicts=$(find "$results" -path "$results/rank-*/verdict.json" | wc -l)
if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
    echo "pytest-nixl: no end after $limit s (or killed): see $results" >&2
fi
if [ "$verdicts" -ne "$ranks" ]; then
    echo "pytest-nixl: $verdicts of $ranks ranks left a verdict in $results" >&2
    [ "$code" -ne 0 ] || code=1
fi
echo "pytest-nixl: exit code $code, results in $results"
exit "$code"

# SPDX-License-Identifier: Apache-2.0
# Functions for scripts that run in a machine. BASE is the folder that prepare.sh made.

# Install Debian's RDMA libraries, as the packages do: the machine's own files hide those of the host.
install_rdma() {
    tar -C "$BASE/rdma" -c . | tar -C / -x --keep-directory-symlink && ldconfig
}

# add_rxe NAME ADDRESS INTERFACE: add a soft-RoCE device over INTERFACE, which is made with a peer if it is not there.
add_rxe() {
    [ -e "/sys/class/net/$3" ] || ip link add "$3" type veth peer name "$3-peer" || return
    [ ! -e "/sys/class/net/$3-peer" ] || ip link set "$3-peer" up
    ip address add "$2/24" dev "$3" && ip link set "$3" up || return
    rdma link add "$1" type rxe netdev "$3" || {
        echo "the kernel cannot add a device of soft-RoCE: is the module rdma_rxe loaded? read the machine's console" >&2
        return 1
    }
    for _ in $(seq 300); do
        grep -q ACTIVE "/sys/class/infiniband/$1/ports/1/state" && return
        sleep 0.1
    done
    echo "$1 is not ACTIVE" >&2
    return 1
}

# Make the libibverbs of NIXL's wheel and that of the providers one copy, as the check ucx-uses-rdma says, for all later
# commands.
one_libibverbs() {
    mkdir -p /opt/verbs && ln -sf "$WHEEL_VERBS" /opt/verbs/libibverbs.so.1 \
        && echo 'export LD_LIBRARY_PATH=/opt/verbs:/usr/lib/x86_64-linux-gnu/libibverbs' >> /out/environment
}

# Let every user of the machine reach the Python of the tests and the project, whatever their folders allow on the host.
let_all_users_in() {
    for path in "$PYTHON" "$(readlink -f "$PYTHON")" "$PROJECT"; do
        while [ "$path" != / ]; do
            path=$(dirname "$path")
            chmod o+x "$path" || return
        done
    done
}

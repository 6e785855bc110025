#!/usr/bin/env bash
# Runs a program on N ranks with mpirun, on one machine or several, with the options that multithreaded ranks need.
#
#   scripts/launch.sh [--restart R] N program flags...
#   scripts/launch.sh 4 ./train_gpt2 --train-data "data/*_train_*.bin" ...
#   scripts/launch.sh 8 ./train_gpt2cu ...      one rank per GPU
#
#   --restart R          if a rank dies, start the job again with --resume, up to R times; but not after a signal
#                        that stops it, nor if a restart cannot help: exit codes 0, 2 to 5, 7 and 75 (doc/training.md)
#   PAUSE=5              seconds before a restart
#   HOSTFILE=file        Open MPI's hostfile (lines `name slots=K`, or PBS's $PBS_NODEFILE); without it all ranks run here
#   FORWARD="A B"        names of variables that other machines receive besides those listed below
#   OMP_NUM_THREADS=K    threads per rank; otherwise this machine's cores divided by its number of ranks, or fewer
#                        if a container's CPU quota allows fewer
#   GRACE=2              after an error: seconds until mpirun tells the other ranks to end, and then until it kills them
#   LATE=70              seconds that ranks on one machine may run on after the first has ended; then they are killed
#   MPIRUN=mpirun        a different mpirun, optionally followed by flags for it
#
# Ctrl-C, SIGTERM, SIGHUP (sent when the terminal closes) or SIGUSR1 lets the program save a checkpoint, however long
# that takes; a second Ctrl-C ends it at once, as does kill -9 on launch.sh. When a machine vanishes, the remaining ranks
# end with exit code 6 (--rank-timeout), and launch.sh follows a few seconds later with the same code.
#
# Other machines receive those of these variables that are set, and OMP_NUM_THREADS, OMP_WAIT_POLICY and TERM. mpirun
# sends their values over the network in the clear, so there are no patterns, which could match a secret.
#   PATH LD_LIBRARY_PATH FLASH90 DNNL_VERBOSE OPENBLAS_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_STACKSIZE
#   OMP_THREAD_LIMIT CUDA_CACHE_DISABLE CUDA_CACHE_PATH CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER
#   CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_VISIBLE_DEVICES NCCL_ALGO NCCL_BUFFSIZE NCCL_CROSS_NIC
#   NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA
#   NCCL_IB_PKEY NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_LAUNCH_MODE
#   NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_PLUGIN
#   NCCL_NSOCKS_PERTHREAD NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE
#   NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_TOPO_FILE NCCL_TUNER_PLUGIN UCX_IB_GID_INDEX
#   UCX_IB_SL UCX_IB_TRAFFIC_CLASS UCX_LOG_LEVEL UCX_MAX_RNDV_RAILS UCX_MEMTYPE_CACHE UCX_NET_DEVICES
#   UCX_POSIX_USE_PROC_LINK UCX_RNDV_SCHEME UCX_TLS
#
# Example: scripts/launch.sh 2 ./train_gpt2 --train-data "data/shakespeare/*_train_*.bin" --out out/two
# See doc/ranks.md and doc/gpu.md.
set -euo pipefail
for fd in 0 1 2; do [ -e /dev/fd/$fd ] || eval "exec $fd<> /dev/null"; done    # closed ones would be those of pipes
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac

usage() { echo "launch.sh: $1" >&2; echo "  Usage: scripts/launch.sh [--restart R] N program flags..." >&2; exit 2; }

{    # bash reads all of this before it runs it, so that the file may change during a job
restarts=0
if [[ ${1:-} == --restart=* ]]; then set -- --restart "${1#*=}" "${@:2}"; fi
if [ "${1:-}" = --restart ]; then
    restarts=${2:-}
    [[ $restarts =~ ^(0|[1-9][0-9]{0,5})$ ]] || usage "--restart \"$restarts\": expected the number of restarts, 0 or more."
    shift 2
fi
[[ ! ${1:-} =~ ^[0-9]+$ || ${2:-} != --* ]] || usage "$2: expected a program after the number of ranks; --restart R comes before that number."
# Do the flags have --out, or a file of flags that has it?
names_out() {
    local word file last=
    for word; do
        file=
        case $word in --out | --out=*) return 0 ;; --config=*) file=${word#*=} ;; esac
        [ "$last" != --config ] || file=$word
        if [ -n "$file" ] && grep -qE '^[[:space:]]*(out[[:space:]]*=|"out":[[:space:]]*")' "$file" 2> /dev/null; then return 0; fi
        last=$word
    done
    return 1
}
[[ ${GRACE:-2} =~ ^(0|[1-9][0-9]{0,5})$ ]] || usage "GRACE=$GRACE: expected a number of seconds without a fraction."
[[ ${PAUSE:-5} =~ ^[0-9]+(\.[0-9]+)?$ ]] || usage "PAUSE=$PAUSE: expected a number of seconds."
[ $# -ge 2 ] || usage "expected a number of ranks and a program, found $# arguments."
ranks=$1
shift
[[ $ranks =~ ^[1-9][0-9]{0,5}$ ]] || usage "\"$ranks\": expected a number of ranks, 1 or more."
command -v "$1" > /dev/null || usage "$1: not found or not executable. Build it with make or make train_gpt2cu."
[[ $restarts == 0 ]] || names_out "$@" || usage "--restart needs --out, the run folder from which a restart resumes."

[ "$ranks" -gt 1 ] || [ "$restarts" -gt 0 ] || exec "$@"    # one rank needs no MPI

read -ra mpirun <<< "${MPIRUN:-mpirun}"
if [ "$ranks" -gt 1 ] && ! command -v "${mpirun[0]}" > /dev/null; then
    echo "launch.sh: ${mpirun[0]} is not installed, but $ranks ranks need it." >&2
    echo "  On Debian: apt install openmpi-bin libopenmpi-dev, then run make again. A single rank works without it." >&2
    exit 2
fi

# Prints the name of each machine in HOSTFILE and the number of its slots, on the first line whether `slots=` gives it.
# Without, a name counts once for each of its lines, as PBS writes them; if each has one line, they get equal shares.
list_machines() {
    awk -v ranks="$ranks" '
        /^[[:space:]]*(#|$)/ { next }
        !($1 in slots) { names[++n] = $1 }
        !match($0, /[[:space:]]slots[[:space:]]*(=[[:space:]]*[^[:space:]#]*)?/) { slots[$1]++; lines++; next }
        { count = substr($0, RSTART, RLENGTH); sub(/.*=[[:space:]]*/, "", count); slots[$1] += count; given = 1 }
        count !~ /^[1-9][0-9]*$/ || length(count) > 5 { wrong = $0 }
        END {
            print (wrong ? wrong : given ? "given" : "counted")
            for (i = 1; i <= n; i++) print names[i], (given || lines > n ? slots[names[i]] : int((ranks + n - 1) / n))
        }' "$HOSTFILE"
}

# Ranks of a machine are neighbors: ranks 0 to 7 are on the first, 8 to 15 on the next.
machines=1
here=$ranks    # on the machine with the most
names=()
flags=(-np "$ranks" --map-by slot:OVERSUBSCRIBE --bind-to none)
if [ -n "${HOSTFILE:-}" ]; then
    [ -f "$HOSTFILE" ] && [ -r "$HOSTFILE" ] || usage "HOSTFILE=$HOSTFILE: expected a file that can be read."
    ! LC_ALL=C grep -qa $'[\001-\010\013-\037]' "$HOSTFILE" ||
        usage "HOSTFILE=$HOSTFILE: has control characters. If they are Windows line ends: sed -i 's/\r\$//' $HOSTFILE"
    all=0 most=0 hosts=
    { read -r how
      while read -r name count; do
          names+=("$name") hosts+=,$name:$count all=$((all + count)) most=$((count > most ? count : most))
      done; } < <(list_machines)
    [[ $how == given || $how == counted ]] || usage "HOSTFILE=$HOSTFILE: $how: expected slots=K, a number from 1 to 99999."
    machines=${#names[@]}
    [ "$machines" -gt 0 ] || usage "HOSTFILE=$HOSTFILE: lists no machine."
    [[ " ${names[*]}" != *" -"* ]] || usage "HOSTFILE=$HOSTFILE: the name of a machine begins with \"-\", as an option of ssh does."
    if [ "$ranks" -gt "$all" ]; then here=$(((ranks + machines - 1) / machines))
    elif [ "$ranks" -gt "$most" ]; then here=$most; fi
    if [ "$how" = given ]; then flags+=(--hostfile "$HOSTFILE"); else flags+=(--host "${hosts#,}"); fi
    forwarded=$(sed -n '/^# Other machines receive/,/^set/s/^#   //p' "$0")
    # At the end of its input, read has read everything and returns 1.
    read -ra variables -d '' <<< "$forwarded ${FORWARD:-}" || true
    for name in "${variables[@]}"; do
        [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || usage "FORWARD=$FORWARD: expected names of variables."
        ! printenv "$name" > /dev/null || flags+=(-x "$name")
    done
    for name in $(compgen -e); do
        case "$name ${variables[*]} OMP_NUM_THREADS OMP_WAIT_POLICY " in
            *" ${name} "*) ;;
            NCCL_* | OMP_* | UCX_*) echo "launch.sh: other machines do not receive $name; FORWARD=$name passes it on." >&2 ;;
        esac
    done
fi
[ "$(id -u)" -ne 0 ] || flags+=(--allow-run-as-root)

# Where mpirun cannot open its pipes, or MPI its files of shared memory (4 MiB each), they hang.
files=$((64 + 5 * here)) size=$(ulimit -f)
if [ "$ranks" -gt 1 ] && [ "$(ulimit -n)" != unlimited ] && [ "$(ulimit -n)" -lt "$files" ] && ! ulimit -Sn "$files" 2> /dev/null; then
    echo "launch.sh: $here ranks need $files open files, but the limit is $(ulimit -n). Raise it: ulimit -n 4096" >&2
    exit 4
fi
if [ "$ranks" -gt 1 ] && [ "$size" != unlimited ] && [ "$size" -lt 8192 ]; then
    echo "launch.sh: MPI needs files of 8192 KiB, but the limit is $size. Raise it: ulimit -f unlimited" >&2
    exit 4
fi

# By default, Open MPI binds a rank with all its threads to one core, and threads that wait for work and ranks that
# wait for a message spin. With more of these than free cores, a parallel region takes a whole time slice, hundreds
# of times as long as with these settings.
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
threads=${OMP_NUM_THREADS:-$((cores / here > 0 ? cores / here : 1))}
[ -n "${OMP_NUM_THREADS:-}" ] || flags+=(-x CORES_DIVIDED=1)    # a quota of CPU time may allow a rank fewer threads
flags+=(-x "OMP_NUM_THREADS=$threads" -x "OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}")
export OMPI_MCA_mpi_yield_when_idle=1

# When mpirun is asked to end, it waits GRACE seconds, sends SIGTERM, waits GRACE seconds again and kills the ranks,
# which does not leave a run time to save. So mpirun gets a session of its own, out of reach of Ctrl-C, and a stop goes
# to the ranks as SIGUSR1, which mpirun passes on at once; SIGUSR2, which nobody catches, ends them.
export OMPI_MCA_odls_base_sigkill_timeout=${GRACE:-2} PRTE_MCA_odls_base_sigkill_timeout=${GRACE:-2}    # Open MPI 4 and 5
[ -t 1 ] || flags+=(-x TERM=dumb)    # each rank sees a terminal that mpirun made

# mpirun would outlive a launch.sh killed by SIGKILL, so the kernel sends it SIGUSR2 in that case.
together=()
! command -v setpriv > /dev/null || together=(setpriv --pdeathsig USR2)

# When a machine vanishes, mpirun waits for its report until TCP gives up, about 15 minutes. So the output is searched
# for the ranks' message about it, and then mpirun and its ssh clients get a few seconds to end by themselves.
watcher=
watch_errors() {
    local line
    trap '' INT TERM HUP USR1
    while IFS= read -r line || [ -n "$line" ]; do
        printf '%s\n' "$line" >&2
        [[ $line != *"no heartbeat from rank "* ]] || kill -PROF $$
    done
}
job=
lost=        # a rank has reported such a machine
vanished=    # and mpirun is to end
killer=      # the process that will kill mpirun
clients=     # mpirun's children, which may outlive it and would hold our output open
children() { cat /proc/"$1"/task/*/children 2> /dev/null || true; }
end_later() {
    [ -z "$killer" ] || return 0
    clients=$(children "$job")
    { sleep $((2 * ${GRACE:-2} + 5)); kill -KILL "$job" $clients; } > /dev/null 2>&1 &
    killer=$!
}
end_soon() {
    lost=
    [ -n "$watcher" ] || return 0    # the report came after the end of its job
    vanished=1
    end_later
}
trap lost=1 PROF    # not ALRM, which bash uses for the limit of read

# If a rank dies while it connects to mpirun, mpirun can deadlock on its way out, after all ranks have ended (Open MPI
# 4.1 with PMIx 4.2). So mpirun is killed once its children have ended and it has not followed them for 10 seconds; if it
# cannot start any, after a minute; and 10 seconds after launch.sh was killed, if it ignores that. And it would wait
# forever for a rank that is stuck when the others have ended, or that waits for one that ended before it started MPI.
watch_children() {
    local idle=0 most=10 late=0 alive left
    trap '' INT TERM HUP USR1
    while [ "$idle" -lt "$most" ]; do
        sleep 1
        kill -0 "$1" || return
        alive=() left=
        for pid in $(children "$1"); do ! living "$pid" || alive+=("$pid"); done
        if living $$ && [ ${#alive[@]} -gt 0 ]; then idle=0; else idle=$((idle + 1)); fi
        if living $$ && ! has_started "$1"; then most=60; else most=10; fi
        [ ${#alive[@]} -ge "$ranks" ] || left=$(ranks_of "${alive[@]}")
        if [ -n "$left" ]; then late=$((late + 1)); else late=0; fi
        if [ "$late" -ge "${LATE:-70}" ]; then
            echo "launch.sh: $late s ago the first of these ranks ended:" $(seq 0 $((ranks - 1)) | grep -vxF "$left"). \
                "The others wait for them or hang, and are killed:" $left >&3
            kill -KILL "${alive[@]}"
        fi
    done
    if living $$; then kill -VTALRM $$; else kill -KILL "$1" "${alive[@]}"; fi
}
ranks_of() {
    for pid; do tr '\0' '\n' < /proc/"$pid"/environ; done 2> /dev/null | sed -n 's/^OMPI_COMM_WORLD_RANK=//p'
}
# Has mpirun ended, or has it children, or had some and waited for them (cminflt > 0)?
has_started() {
    local line fields
    read -r line 2> /dev/null < /proc/"$1"/stat || return 0
    read -ra fields <<< "${line##*) }"
    [ "${fields[8]}" -gt 0 ] || [ -n "$(children "$1")" ]
}
# Is one of these processes more than a zombie?
living() {
    local pid line
    for pid; do
        if read -r line < /proc/"$pid"/stat && [[ $line != *") Z "* ]]; then return 0; fi
    done
    return 1
}
deadlock=
on_deadlock() {
    deadlock=1
    [ -z "$job" ] || kill -KILL "$job"
}
trap on_deadlock VTALRM

signal=USR1
stopped=    # a stop was asked for
asked=      # and has to be passed on to the job
trap 'stopped=1 asked=1' TERM HUP USR1    # under nohup, SIGHUP stays ignored
# Ctrl-C may arrive twice within moments, from the terminal and from a wrapper that passes it on, so only one that
# comes a second later ends the job at once.
interrupted=
interrupt() {
    local now=${EPOCHREALTIME/[.,]/}
    local apart=$((now - ${interrupted:-$now}))    # microseconds; negative if the clock was set back
    [ -z "$interrupted" ] || [ "${apart#-}" -lt 1000000 ] || signal=USR2
    interrupted=${interrupted:-$now}
    stopped=1 asked=1
}
trap interrupt INT
passed=     # the signal that the job got
pass_on() {
    asked=
    [ "$signal" != "$passed" ] || return 0
    passed=$signal
    [ "$signal" = USR1 ] || end_later
    # mpirun drops a signal for ranks that it has not started yet, so a young job gets it again; but not once its ranks
    # have ended, because it would die of it instead of returning their exit code. Without any rank, it is killed.
    if [ "$ranks" -eq 1 ] || [ "$machines" -gt 1 ] || living $(children "$job"); then
        kill "-$signal" "$job" 2> /dev/null || true
    fi
    if [ "$ranks" -gt 1 ] && { [ $((SECONDS - began)) -lt 3 ] || ! has_started "$job"; }; then
        {
            for pause in 1 2; do
                sleep $pause
                if kill -0 $$ && living $(children "$job"); then kill "-$signal" "$job"; fi
            done
            sleep 2
            [ "$machines" -gt 1 ] || has_started "$job" || kill -VTALRM $$
        } > /dev/null 2>&1 &
    fi
}

# Waits for a job, whatever signals arrive. Sets status. It asks again and again, because a trapped signal that
# interrupts bash's wait can cost the exit code: bash 5.2 loses that of a process which ends at the same moment. Traps
# therefore run during `read`, where they must not start processes, so they only set variables.
exec {never}<> <(:)    # a pipe that stays empty: reading from it is a pause
wait_for_job() {
    while kill -0 "$job" 2> /dev/null; do
        read -rt 0.1 -u "$never" || true
        [ -z "$asked" ] || pass_on
        [ -z "$lost" ] || end_soon
    done
    status=0
    wait "$job" 2> /dev/null || status=$?
    job=
}

# Names the machines that cannot be reached, for which Open MPI would wait until TCP gives up. A batch system may have
# other ways to start processes than ssh.
is_here() {
    local name=$1 address ours=" 127.0.0.1 ::1 $(hostname -I 2> /dev/null) "
    [ "$name" != "$HOSTNAME" ] || return 0
    for address in $(getent ahosts "$name" | awk '{ print $1 }'); do
        [[ $ours != *" $address "* ]] || return 0
    done
    return 1
}
reach() {
    local agent said
    agent=${OMPI_MCA_plm_rsh_agent:-${PRTE_MCA_plm_rsh_agent:-ssh}}
    read -ra agent <<< "${agent%% :*}"
    [ "${agent##*/}" != ssh ] || agent+=(-o BatchMode=yes -o ConnectTimeout=10)
    said=$(timeout 15 "${agent[@]}" "$1" true 2>&1 < /dev/null) || echo "  $1: ${said##*$'\n'}"
}
reach_machines() {
    local name unreached
    [ ${#names[@]} -gt 0 ] && [ -z "${SLURM_JOB_ID:-}${PBS_JOBID:-}${LSB_JOBID:-}" ] || return 0
    unreached=$(for name in "${names[@]}"; do is_here "$name" || reach "$name" & done; wait)
    [ -n "$unreached" ] || return 0
    echo "launch.sh: cannot reach these machines of HOSTFILE:" >&2
    echo "$unreached" >&2
    echo "  Check their names, and that ssh needs no password there: ssh NAME true" >&2
    return 1
}

# Runs the job once. Sets status to its exit code.
run_job() {
    lost= vanished= killer= passed=
    reach_machines || { status=6; return; }
    if [ "$machines" -gt 1 ]; then
        exec {errors}> >(watch_errors)
        watcher=$!
    else
        exec {errors}>&2
    fi
    began=$SECONDS
    "${together[@]}" setsid "$@" <&0 2>&$errors {errors}>&- {never}>&- &
    job=$!
    exec {errors}>&-
    local guard=
    deadlock=
    if [ "$ranks" -gt 1 ] && [ "$machines" -eq 1 ]; then
        watch_children "$job" 3>&2 > /dev/null 2>&1 &
        guard=$!
    fi
    wait_for_job
    if [ -n "$guard" ]; then
        kill -KILL "$guard" 2> /dev/null || true
        wait "$guard" 2> /dev/null || true
    fi
    if [ -n "$deadlock" ]; then
        echo "launch.sh: mpirun was killed: it started no rank, or was still running 10 s after all ranks had ended." >&2
        status=6
    fi
    [ -z "$killer" ] || kill "$killer" 2> /dev/null || true
    if [ -n "$vanished" ]; then
        kill -KILL $clients 2> /dev/null || true
        status=6
    elif [ -n "$watcher" ]; then
        wait "$watcher" || true
    fi
    watcher=
}

can_help() { case $1 in 0 | 2 | 3 | 4 | 5 | 7 | 75) return 1 ;; esac; }

command=("$@")
[ "$ranks" -eq 1 ] || command=("${mpirun[@]}" "${flags[@]}" "$@")
run_job "${command[@]}"
for ((restart = 1; restart <= restarts; restart++)); do
    [ -z "$stopped" ] && can_help "$status" || break
    echo "launch.sh: the job ended with exit code $status. Restart $restart of $restarts follows in ${PAUSE:-5} s." >&2
    sleep "${PAUSE:-5}" > /dev/null 2>&1 &
    job=$!    # a stop ends the pause
    last=$status
    wait_for_job
    status=$last
    [ -z "$stopped" ] || break
    run_job "${command[@]}" --resume
done
if [ "$restarts" -gt 0 ] && [ -z "$stopped" ] && can_help "$status"; then
    echo "launch.sh: the job ended with exit code $status after restart $restarts, the limit of --restart." >&2
elif [ "$status" -gt 128 ] && [ -z "$stopped" ] && names_out "$@"; then
    echo "launch.sh: a rank was killed or crashed (exit code $status). --resume continues from the newest checkpoint." >&2
fi
exit "$status"
}

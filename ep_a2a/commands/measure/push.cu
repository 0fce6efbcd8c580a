// Pushes contiguous vectors of 16 bytes to every peer, then one flag each, and waits for the peers' flags.
//
// push.py defines NUM_PEERS, PEERS_PER_BLOCK (1, or NUM_PEERS), LOADS (vectors that a thread loads before it stores the
// first), MAX_THREADS, POLLS_PER_CLOCK_READING, TIMEOUT_NS and FOR_EACH_PEER (sizes and addresses) above this text.

__device__ __forceinline__ unsigned arrive(unsigned* counter)
{
    // A block's stores go to peers, but only the last block of this GPU must observe them: its release to the system
    // covers what it has acquired.
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

__device__ __forceinline__ void tell(unsigned long long flag, unsigned epoch)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(flag), "r"(epoch) : "memory");
}

__device__ __forceinline__ unsigned told(unsigned long long flag)
{
    unsigned epoch;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(epoch) : "l"(flag) : "memory");
    return epoch;
}

__device__ __forceinline__ unsigned long long now_ns()
{
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ uint4 load(const uint4* from)
{
    uint4 held;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(held.x), "=r"(held.y), "=r"(held.z), "=r"(held.w) : "l"(from));
    return held;
}

__device__ __forceinline__ void store(uint4* to, const uint4& held)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
        : : "l"(to), "r"(held.x), "r"(held.y), "r"(held.z), "r"(held.w) : "memory");
}

template <int NUM>
__device__ __forceinline__ void copy_batch(uint4* to, const uint4* from, int stride)
{
    uint4 held[NUM + 1];
    #pragma unroll
    for (int each = 0; each < NUM; ++each) held[each] = load(from + each * stride);
    #pragma unroll
    for (int each = 0; each < NUM; ++each) store(to + each * stride, held[each]);
}

// NUM vectors or more are left to this thread. Each number has code of its own: conditions per load would take registers,
// which are few, and some loads would then follow the first store.
template <int NUM>
__device__ __forceinline__ void copy_rest(uint4* to, const uint4* from, int left, int stride)
{
    if (NUM * stride >= left)
        copy_batch<NUM>(to, from, stride);
    else if constexpr (NUM < LOADS - 1)
        copy_rest<NUM + 1>(to, from, left, stride);
}

__device__ __forceinline__ void copy(uint4* to, const uint4* from, int count, int first, int stride)
{
    for (; first + (LOADS - 1) * stride < count; first += LOADS * stride)
        copy_batch<LOADS>(to + first, from + first, stride);
    copy_rest<0>(to + first, from + first, count - first, stride);
}

__device__ __forceinline__ void wait_for(unsigned long long flag, unsigned epoch, volatile unsigned* gave_up)
{
    unsigned long long deadline = 0;
    // Epochs wrap, so they are compared by their distance.
    for (unsigned polls = 1; (int)(told(flag) - epoch) < 0; ++polls) {
        if (polls % POLLS_PER_CLOCK_READING != 0) continue;
        const unsigned long long now = now_ns();
        if (deadline == 0) deadline = now + TIMEOUT_NS;
        // After one flag that did not come, later launches do not wait as long again.
        if (now >= deadline || *gave_up != 0) {
            *gave_up = 1;
            return;
        }
    }
}

// The bound of one block per multiprocessor keeps the compiler from saving registers at the cost of loads in flight.
// state: epoch, blocks that have arrived, whether a wait was given up. With one peer per block the grid is a multiple of
// NUM_PEERS.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) push(const uint4* source, unsigned* state)
{
    // Loaded before the copy: the last block needs it at once.
    const unsigned epoch = *(volatile unsigned*)state + 1;

    unsigned long long flag_there = 0, flag_here = 0;
    #define CHOOSE_FLAGS(PEER, FIRST_VECTOR, NUM_VECTORS, TARGET, FLAG_THERE, FLAG_HERE) \
        if (threadIdx.x == PEER) { flag_there = FLAG_THERE; flag_here = FLAG_HERE; }
    FOR_EACH_PEER(CHOOSE_FLAGS)

    // Blocks of the same peer, or all of them, copy in turn.
    const int block = blockIdx.x / (NUM_PEERS / PEERS_PER_BLOCK);
    const int num_blocks = gridDim.x / (NUM_PEERS / PEERS_PER_BLOCK);
    #pragma unroll 1
    for (unsigned turn = 0; turn < PEERS_PER_BLOCK; ++turn) {
        const unsigned peer = (blockIdx.x + turn) % NUM_PEERS;
        long long first_vector = 0;
        int count = 0;
        unsigned long long target = 0;
        #define CHOOSE_PART(PEER, FIRST_VECTOR, NUM_VECTORS, TARGET, FLAG_THERE, FLAG_HERE) \
            if (peer == PEER) { first_vector = FIRST_VECTOR; count = NUM_VECTORS; target = TARGET; }
        FOR_EACH_PEER(CHOOSE_PART)
        const int first = block * blockDim.x + threadIdx.x;
        copy((uint4*)target, source + first_vector, count, first, num_blocks * blockDim.x);
    }

    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) is_last = arrive(state + 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last || threadIdx.x >= NUM_PEERS) return;
    tell(flag_there, epoch);
    if (threadIdx.x == 0) {
        // No other block of this launch reads them from here on.
        state[0] = epoch;
        state[1] = 0;
    }
    wait_for(flag_here, epoch, state + 2);
}

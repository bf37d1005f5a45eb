/* A heap that shows each wrong access to it, for test_guarded_heap.py: LD_PRELOAD a shared object of this file.
 *
 * Each block of at most MOST bytes has pages of its own. It ends at a page that cannot be accessed, and once it is freed
 * its pages are never accessible again. So an access behind a block's end, an access to a freed block and a second free
 * end the process, at the speed and with the instructions of the machine. Bytes between the block and its pages' edges
 * are compared when it is freed. Blocks are guarded in forks of a process alone: those that a program allocates while it
 * imports torch would need more mappings than Linux allows.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096UL
#define SLOT (3 * PAGE) /* at most two pages of a block, and the page behind it */
#define MOST (2 * PAGE)
#define NUM_SLOTS (4UL << 20)
#define MOST_LIVE 28000 /* each takes two mappings, and vm.max_map_count is 65530 */
#define FILLED 0xA7

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t), __libc_free(void *);

enum state { UNUSED, LIVE, FREED };
struct block { char *start; uint32_t size; enum state state; };

static char *arena;
static struct block *blocks;
static atomic_ulong next_slot;
static atomic_long num_live, num_guarded, num_freed, num_unguarded;
static __thread int is_inside;

static void report(const char *what, const void *address, const struct block *block) {
    char text[200];
    int length = snprintf(text, sizeof text, "guarded heap: %s at %+ld of a block of %u bytes, process %d\n", what,
                          (long)((const char *)address - block->start), block->size, getpid());
    if (write(2, text, length) < 0) { /* nobody to tell */ }
}

static struct block *block_at(const void *address) {
    const char *place = address;
    return arena && place >= arena && place < arena + NUM_SLOTS * SLOT ? &blocks[(place - arena) / SLOT] : NULL;
}

static void on_fault(int number, siginfo_t *info, void *context) {
    struct block *block = block_at(info->si_addr);
    (void)context;
    if (block) report(block->state == FREED ? "access after the free" : "access outside", info->si_addr, block);
    signal(number, SIG_DFL);
    raise(number);
}

static void begin(void) {
    if (arena) return;
    void *pages = mmap(NULL, NUM_SLOTS * SLOT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *table = mmap(NULL, NUM_SLOTS * sizeof *blocks, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED || table == MAP_FAILED) abort();
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    blocks = table;
    arena = pages;
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, begin); }

static char *end_of(const char *start) { return arena + (start - arena) / SLOT * SLOT + 2 * PAGE; }

static size_t pages_of(size_t size) { return size > PAGE ? 2 * PAGE : PAGE; }

static void *guarded(size_t alignment, size_t size) {
    if (!arena || is_inside || size > MOST || alignment > PAGE) return NULL;
    if (num_live >= MOST_LIVE) {
        num_unguarded++;
        return NULL;
    }
    unsigned long slot;
    do slot = atomic_fetch_add(&next_slot, 1) % NUM_SLOTS;
    while (blocks[slot].state == LIVE);
    size_t length = size ? size : 1;
    char *end = arena + slot * SLOT + 2 * PAGE, *first = end - pages_of(length);
    if (mprotect(first, end - first, PROT_READ | PROT_WRITE)) return NULL;
    char *start = (char *)((uintptr_t)(end - length) & ~((alignment > 16 ? alignment : 16) - 1));
    memset(first, FILLED, end - first);
    blocks[slot] = (struct block){start, length, LIVE};
    num_live++;
    num_guarded++;
    return start;
}

static void check_edges(const struct block *block, const char *first, const char *end) {
    for (const char *place = first; place < end; place++) {
        if (place == block->start) place += block->size;
        if (place < end && (unsigned char)*place != FILLED) {
            report("write outside", place, block);
            abort();
        }
    }
}

void free(void *start) {
    struct block *block = start ? block_at(start) : NULL;
    if (!block) {
        __libc_free(start);
        return;
    }
    if (block->state != LIVE || block->start != start) {
        is_inside = 1;
        report("second or wrong free", start, block);
        abort();
    }
    char *end = end_of(start), *first = end - pages_of(block->size);
    check_edges(block, first, end);
    block->state = FREED;
    mprotect(first, end - first, PROT_NONE);
    madvise(first, end - first, MADV_DONTNEED);
    num_live--;
    num_freed++;
}

void *malloc(size_t size) {
    void *start = guarded(16, size);
    return start ? start : __libc_malloc(size);
}

void *calloc(size_t number, size_t size) {
    size_t product;
    void *start = __builtin_mul_overflow(number, size, &product) ? NULL : guarded(16, product);
    return start ? memset(start, 0, product) : __libc_calloc(number, size);
}

void *realloc(void *start, size_t size) {
    struct block *block = start ? block_at(start) : NULL;
    if (!start) return malloc(size);
    if (!block) return __libc_realloc(start, size);
    void *moved = malloc(size);
    if (moved) {
        memcpy(moved, start, block->size < size ? block->size : size);
        free(start);
    }
    return moved;
}

void *memalign(size_t alignment, size_t size) {
    void *start = guarded(alignment, size);
    return start ? start : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *start = memalign(alignment, size);
    if (start) *result = start;
    return start ? 0 : ENOMEM;
}

size_t malloc_usable_size(void *start) {
    static size_t (*library)(void *);
    struct block *block = start ? block_at(start) : NULL;
    if (block) return block->size;
    if (!library) library = (size_t(*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return library(start);
}

/* Ranks of tests end by os._exit. */
void _exit(int code) {
    char text[200];
    int length = snprintf(text, sizeof text, "guarded heap: process %d, %ld blocks, %ld freed, %ld not guarded\n", getpid(),
                          num_guarded, num_freed, num_unguarded);
    if (arena && write(2, text, length) < 0) { /* nobody to tell */ }
    syscall(SYS_exit_group, code);
    __builtin_unreachable();
}

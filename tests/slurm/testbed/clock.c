/* A clock that is some seconds ahead (CLOCK_AHEAD_S) for the process that preloads this library.
 *
 * Debian 12's libfaketime 0.9.10 cannot do it: time.sleep() of Python 3.11 fails with EINVAL under it (its issue 426).
 * Only the wall clock is shifted. Waits keep their lengths, and times of files are the file server's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
/* A deadline below 30 years is one of the monotonic clock, which counts from the host's start. */
#define IS_WALL(deadline) ((deadline)->tv_sec > 30L * 365 * 24 * 3600)

static long ahead_s(void) {
    static long kept;
    static int known;
    if (!known) {
        const char *text = getenv("CLOCK_AHEAD_S");
        kept = text ? atol(text) : 0;
        known = 1;
    }
    return kept;
}

int clock_gettime(clockid_t clock, struct timespec *result) {
    static __typeof__(&clock_gettime) next;
    if (!next) next = NEXT(clock_gettime);
    int code = next(clock, result);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) result->tv_sec += ahead_s();
    return code;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
    static __typeof__(&gettimeofday) next;
    if (!next) next = NEXT(gettimeofday);
    int code = next(result, zone);
    if (code == 0) result->tv_sec += ahead_s();
    return code;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

static const struct timespec *of_the_host(const struct timespec *deadline, struct timespec *shifted) {
    if (!deadline || !IS_WALL(deadline)) return deadline;
    *shifted = *deadline;
    shifted->tv_sec -= ahead_s();
    return shifted;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    static __typeof__(&clock_nanosleep) next;
    struct timespec shifted;
    if (!next) next = NEXT(clock_nanosleep);
    if (clock == CLOCK_REALTIME && (flags & TIMER_ABSTIME)) until = of_the_host(until, &shifted);
    return next(clock, flags, until, left);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static __typeof__(&sem_timedwait) next;
    struct timespec shifted;
    if (!next) next = NEXT(sem_timedwait);
    return next(semaphore, of_the_host(deadline, &shifted));
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    static __typeof__(&pthread_mutex_timedlock) next;
    struct timespec shifted;
    if (!next) next = NEXT(pthread_mutex_timedlock);
    return next(mutex, of_the_host(deadline, &shifted));
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static __typeof__(&pthread_cond_timedwait) next;
    struct timespec shifted;
#ifdef __x86_64__ /* there the oldest version of this name is another function */
    if (!next) next = (__typeof__(next))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
#endif
    if (!next) next = NEXT(pthread_cond_timedwait);
    return next(cond, mutex, of_the_host(deadline, &shifted));
}

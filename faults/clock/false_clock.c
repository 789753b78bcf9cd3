/*
 * A host whose wall clock is wrong, or which was suspended: preloaded into a process, it changes what the clocks read.
 *
 * KMQ_FALSE_CLOCK="offset_ms rate_ppm step_after_ms step_ms": the clock is ahead by offset_ms, runs rate_ppm too fast,
 * and after step_after_ms jumps by step_ms (0 0: never).
 *
 * KMQ_FALSE_CLOCK_FILE: a file of two signed 64-bit numbers of milliseconds, host byte order, mapped: by how much the
 * wall clock is ahead in addition, and how long the host was suspended: the clocks that count from the boot are behind by
 * that, all but CLOCK_MONOTONIC_RAW. Another process writes it, and the clocks step at that instant.
 *
 * libfaketime 0.9.10 is not used: under a negative offset librdkafka's waits with an absolute deadline
 * (C11's cnd_timedwait on CLOCK_REALTIME, which it leaves alone) end at once, under a positive one an hour too late.
 * Here such a deadline is turned back into real time before it is waited for. So is one on a clock that stood still.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

/* Deadlines above are on the wall clock, below on the monotonic one: a machine is not up for thirty years. */
#define WALL_FROM_S 1000000000L
#define NS_PER_S 1000000000LL
#define NS_PER_MS 1000000LL

static long long offset_ms, rate_ppm, step_after_ms, step_ms;
static long long began_ns;
static long long none_ms[2];
/* The wall clock's, and how long the host was suspended. */
static volatile long long *moved_ms = none_ms;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static int (*real_cnd_timedwait)(cnd_t *, mtx_t *, const struct timespec *);
static int (*real_sem_clockwait)(sem_t *, clockid_t, const struct timespec *);
static int (*real_clock_nanosleep)(clockid_t, int, const struct timespec *, struct timespec *);

static long long to_ns(const struct timespec *t) { return t->tv_sec * NS_PER_S + t->tv_nsec; }

static void to_timespec(long long ns, struct timespec *t) {
    t->tv_sec = ns / NS_PER_S;
    t->tv_nsec = ns % NS_PER_S;
}

/* Map the file that says how far the clock has been moved; without one it is never moved. */
static void follow(const char *path) {
    int file = path == NULL ? -1 : open(path, O_RDONLY);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof none_ms, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) moved_ms = mapped;
    close(file);
}

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("KMQ_FALSE_CLOCK");
    struct timespec now;
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (real_cond_timedwait == NULL) real_cond_timedwait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    real_cnd_timedwait = dlsym(RTLD_NEXT, "cnd_timedwait");
    real_sem_clockwait = dlsym(RTLD_NEXT, "sem_clockwait");
    real_clock_nanosleep = dlsym(RTLD_NEXT, "clock_nanosleep");
    if (text != NULL) sscanf(text, "%lld %lld %lld %lld", &offset_ms, &rate_ppm, &step_after_ms, &step_ms);
    real_clock_gettime(CLOCK_MONOTONIC, &now);
    began_ns = to_ns(&now);
    follow(getenv("KMQ_FALSE_CLOCK_FILE"));
}

/* How far the false clock is ahead now, in nanoseconds. */
static long long ahead_ns(void) {
    struct timespec now;
    real_clock_gettime(CLOCK_MONOTONIC, &now);
    long long passed_ns = to_ns(&now) - began_ns;
    long long stepped_ms = step_ms != 0 && passed_ns >= step_after_ms * NS_PER_MS ? step_ms : 0;
    return (offset_ms + stepped_ms + moved_ms[0]) * NS_PER_MS + passed_ns / 1000 * rate_ppm / 1000;
}

/* How far a clock is ahead; those that stood still while the host was suspended are behind. */
static long long ahead_of_ns(clockid_t id) {
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) return ahead_ns();
    return id == CLOCK_MONOTONIC || id == CLOCK_MONOTONIC_COARSE || id == CLOCK_BOOTTIME ? -moved_ms[1] * NS_PER_MS : 0;
}

/* The real time of a deadline on a false clock. */
static const struct timespec *real_deadline(clockid_t id, const struct timespec *until, struct timespec *real) {
    to_timespec(to_ns(until) - ahead_of_ns(id), real);
    return real;
}

int clock_gettime(clockid_t id, struct timespec *t) {
    if (real_clock_gettime == NULL) begin();
    int result = real_clock_gettime(id, t);
    if (result == 0) to_timespec(to_ns(t) + ahead_of_ns(id), t);
    return result;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone) {
    struct timespec t;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &t) != 0) return -1;
    tv->tv_sec = t.tv_sec;
    tv->tv_usec = t.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out != NULL) *out = t.tv_sec;
    return t.tv_sec;
}

int timespec_get(struct timespec *t, int base) { return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, t) == 0 ? base : 0; }

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec real;
    if (real_cond_timedwait == NULL) begin();
    clockid_t id = until->tv_sec < WALL_FROM_S ? CLOCK_MONOTONIC : CLOCK_REALTIME;
    return real_cond_timedwait(condition, mutex, real_deadline(id, until, &real));
}

int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict until) {
    struct timespec real;
    if (real_cnd_timedwait == NULL) begin();
    return real_cnd_timedwait(condition, mutex, real_deadline(CLOCK_REALTIME, until, &real));
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t id, const struct timespec *restrict until) {
    struct timespec real;
    if (real_sem_clockwait == NULL) begin();
    return real_sem_clockwait(semaphore, id, real_deadline(id, until, &real));
}

int clock_nanosleep(clockid_t id, int flags, const struct timespec *wanted, struct timespec *left) {
    struct timespec real;
    if (real_clock_nanosleep == NULL) begin();
    if (flags & TIMER_ABSTIME) wanted = real_deadline(id, wanted, &real);
    return real_clock_nanosleep(id, flags, wanted, left);
}

/*
 * A host whose wall clock is wrong: preloaded into one process, it changes what CLOCK_REALTIME reads and nothing else.
 *
 * KMQ_FALSE_CLOCK="offset_ms rate_ppm step_after_ms step_ms": the clock is ahead by offset_ms, runs rate_ppm too fast,
 * and after step_after_ms jumps by step_ms (0 0: never).
 *
 * KMQ_FALSE_CLOCK_FILE: a file of eight bytes, mapped: a signed 64-bit number of milliseconds, host byte order, by which
 * the clock is ahead in addition. Another process writes it, and the clock steps at that instant.
 *
 * libfaketime 0.9.10 is not used: under a negative offset librdkafka's waits with an absolute deadline
 * (C11's cnd_timedwait on CLOCK_REALTIME, which it leaves alone) end at once, under a positive one an hour too late.
 * Here such a deadline is turned back into real time before it is waited for.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
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
static long long none_ms;
static volatile long long *moved_ms = &none_ms;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static int (*real_cnd_timedwait)(cnd_t *, mtx_t *, const struct timespec *);

static long long to_ns(const struct timespec *t) { return t->tv_sec * NS_PER_S + t->tv_nsec; }

static void to_timespec(long long ns, struct timespec *t) {
    t->tv_sec = ns / NS_PER_S;
    t->tv_nsec = ns % NS_PER_S;
}

/* Map the file that says how far the clock has been moved; without one it is never moved. */
static void follow(const char *path) {
    int file = path == NULL ? -1 : open(path, O_RDONLY);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(long long), PROT_READ, MAP_SHARED, file, 0);
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
    return (offset_ms + stepped_ms + *moved_ms) * NS_PER_MS + passed_ns / 1000 * rate_ppm / 1000;
}

int clock_gettime(clockid_t id, struct timespec *t) {
    if (real_clock_gettime == NULL) begin();
    int result = real_clock_gettime(id, t);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) to_timespec(to_ns(t) + ahead_ns(), t);
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
    if (until->tv_sec < WALL_FROM_S) return real_cond_timedwait(condition, mutex, until);
    to_timespec(to_ns(until) - ahead_ns(), &real);
    return real_cond_timedwait(condition, mutex, &real);
}

int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict until) {
    struct timespec real;
    if (real_cnd_timedwait == NULL) begin();
    to_timespec(to_ns(until) - ahead_ns(), &real);
    return real_cnd_timedwait(condition, mutex, &real);
}

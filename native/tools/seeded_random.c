/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Randomness that can be had again: a library to preload (LD_PRELOAD) into programs that stay as they are. Where
 * DQPLBD_SEED is set, getrandom() and getentropy() answer from a generator that starts from its text, and /dev/urandom and
 * /dev/random open as files of such bytes; where it is not, all goes to the system as ever. Each process needs a text of its
 * own, such as "7 h3", else all draw the same numbers. Threads share the stream, in the order in which they ask.
 *
 * For laboratories only: whoever knows the seed knows every key and token.
 */
/* Here open and open64 are two functions: programs may call either. */
#undef _FILE_OFFSET_BITS
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define FILE_BYTES 65536u /* what a reader of /dev/urandom finds before its end; a seed needs 32 */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t state;
static int seeded = -1; /* not looked yet */

/* SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. */
static uint64_t next(void)
{
	uint64_t z = state += 0x9e3779b97f4a7c15ull;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* Fill from the generator; false: there is no seed. */
static int fill(void *out, size_t len)
{
	unsigned char *at = out;
	int have;

	pthread_mutex_lock(&lock);
	if (seeded < 0) {
		const char *text = getenv("DQPLBD_SEED");
		seeded = text && *text;
		state = 0xcbf29ce484222325ull; /* FNV-1a */
		for (; seeded && *text; text++)
			state = (state ^ (unsigned char)*text) * 0x100000001b3ull;
	}
	have = seeded;
	while (have && len) {
		uint64_t word = next();
		size_t n = len < sizeof word ? len : sizeof word;
		memcpy(at, &word, n);
		at += n;
		len -= n;
	}
	pthread_mutex_unlock(&lock);
	return have;
}

EXPORTED ssize_t getrandom(void *out, size_t len, unsigned flags)
{
	if (fill(out, len))
		return (ssize_t)len;
	return syscall(SYS_getrandom, out, len, flags);
}

EXPORTED int getentropy(void *out, size_t len)
{
	if (len > 256) {
		errno = EIO;
		return -1;
	}
	return getrandom(out, len, 0) == (ssize_t)len ? 0 : -1;
}

/* The device as a file of seeded bytes; -1: this is another file, or there is no seed. */
static int open_device(const char *path, int flags)
{
	unsigned char bytes[256];
	int fd;

	if (!path || (strcmp(path, "/dev/urandom") && strcmp(path, "/dev/random")) || !fill(bytes, 0))
		return -1;
	fd = memfd_create("seeded random", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	for (unsigned done = 0; fd >= 0 && done < FILE_BYTES; done += sizeof bytes) {
		fill(bytes, sizeof bytes);
		if (pwrite(fd, bytes, sizeof bytes, done) != (ssize_t)sizeof bytes) {
			close(fd);
			fd = -1;
		}
	}
	return fd;
}

static mode_t mode_of(int flags, va_list *ap)
{
	return flags & (O_CREAT | O_TMPFILE) ? va_arg(*ap, mode_t) : 0;
}

#define OPEN(name, parameters, call)                                                                                               \
	EXPORTED int name parameters;                                                                                              \
	EXPORTED int name parameters                                                                                               \
	{                                                                                                                          \
		va_list ap;                                                                                                        \
		mode_t mode;                                                                                                       \
		int fd = open_device(path, flags);                                                                                 \
		va_start(ap, flags);                                                                                               \
		mode = mode_of(flags, &ap);                                                                                        \
		va_end(ap);                                                                                                        \
		return fd >= 0 ? fd : (int)(call);                                                                                 \
	}

OPEN(open, (const char *path, int flags, ...), syscall(SYS_openat, AT_FDCWD, path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), syscall(SYS_openat, AT_FDCWD, path, flags | O_LARGEFILE, mode))
OPEN(openat, (int at, const char *path, int flags, ...), syscall(SYS_openat, at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), syscall(SYS_openat, at, path, flags | O_LARGEFILE, mode))

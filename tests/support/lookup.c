/* Look-ups of names as they are elsewhere: each takes LOOKUP_MILLIS, and LOOKUP_NAME has the addresses LOOKUP_FIRST and
 * LOOKUP_SECOND. For tests, by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int look_up(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found)
{
    look_up *real = (look_up *)dlsym(RTLD_NEXT, "getaddrinfo");
    const char *millis = getenv("LOOKUP_MILLIS"), *both = getenv("LOOKUP_NAME");
    struct addrinfo *first = NULL, *second = NULL, *last;
    int error;

    if (millis)
        usleep(1000 * atoi(millis));
    if (!name || !both || strcmp(name, both))
        return real(name, service, hints, found);
    if ((error = real(getenv("LOOKUP_FIRST"), service, hints, &first)))
        return error;
    if ((error = real(getenv("LOOKUP_SECOND"), service, hints, &second)))
        return error;
    for (last = first; last->ai_next; last = last->ai_next)
        ;
    last->ai_next = second;
    *found = first;
    return 0;
}

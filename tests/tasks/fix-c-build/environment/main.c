#include <stdio.h>
#include <stdlib.h>

#include "tide.h"

static void show(const char *name, const struct reading *reading)
{
    printf("%s %d at %02d:%02d\n", name, reading->height_cm, reading->hour, reading->minute);
}

int main(void)
{
    struct reading *readings = NULL, next;
    size_t count = 0, room = 0;

    while (scanf("%d:%d %d", &next.hour, &next.minute, &next.height_cm) == 3) {
        if (count == room) {
            room = room ? room * 2 : 16;
            readings = realloc(readings, room);
            if (!readings)
                return 1;
        }
        readings[count++] = next;
    }
    if (count == 0)
        return 1;

    printf("readings %zu\n", count);
    show("highest", &readings[highest(readings, count)]);
    show("lowest", &readings[lowest(readings, count)]);
    printf("rise %zu\n", longest_rise(readings, count));
    free(readings);
    return 0;
}

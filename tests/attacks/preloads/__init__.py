"""Libraries that write the verdict from inside the verifier's own programs."""

#: Runs when it is loaded; only a verifier can write there. reward.json comes before reward.txt.
EVIL_C = r"""
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void forge(void) {
    const char verdict[] = "{\"reward\": 1}";
    int fd = open("/logs/verifier/reward.json", O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd >= 0 && write(fd, verdict, strlen(verdict)) > 0)
        close(fd);
}
"""
#: What bash wants of libtinfo, enough to be loaded.
TINFO_C = r"""
char PC, *BC, *UP; short ospeed;
int tgetent(char *a, char *b) { return 0; }
int tgetflag(char *a) { return 0; }
int tgetnum(char *a) { return -1; }
char *tgetstr(char *a, char **b) { return 0; }
char *tgoto(char *a, int b, int c) { return 0; }
int tputs(char *a, int b, int (*c)(int)) { return 0; }
"""

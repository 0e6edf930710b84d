"""Errors as AWS SDKs read them: a code that programs compare, and words for people."""

from collections.abc import Mapping

from hadelay import errors as ours
from hadelay.aws.signature import NotSigned
from hadelay.errors import HadelayError, shortened

#: Codes that all AWS services share, by the class of the error. Any other error with a status of 500 or more is an
#: InternalFailure, which SDKs retry; any other refusal is a ValidationException.
_COMMON: dict[type[HadelayError], tuple[str, int]] = {
    ours.Unauthorized: ("IncompleteSignature", 403),
    ours.Forbidden: ("AccessDeniedException", 403),
    ours.LimitReached: ("ThrottlingException", 400),
    ours.NoLeader: ("ServiceUnavailable", 503),
    ours.Overloaded: ("ServiceUnavailable", 503),
    ours.DiskFull: ("ServiceUnavailable", 503),
    ours.RequestTimeout: ("RequestExpired", 400),
}


class AwsError(Exception):
    """A refusal with a code of AWS. status: the HTTP status; 400 for an error of the caller."""

    def __init__(self, code: str, words: str, status: int = 400) -> None:
        super().__init__(words)
        self.code, self.words, self.status = code, shortened(words), status


#: Codes of one AWS service for classes of our errors, all with the status 400.
Codes = Mapping[type[HadelayError], str]


def translated(error: HadelayError, own: Codes) -> AwsError:
    """The error of AWS for one of ours. own: codes of the service, which go before those that all services share."""
    if isinstance(error, NotSigned):
        return AwsError(error.code, error.detail, error.http_status)
    for kind in type(error).__mro__:
        if kind in own:
            return AwsError(own[kind], error.detail or error.title)
        if kind in _COMMON:
            return AwsError(_COMMON[kind][0], error.detail or error.title, _COMMON[kind][1])
    if error.http_status >= 500:
        return AwsError("InternalFailure", error.detail or error.title, 500)
    return AwsError("ValidationException", error.detail or error.title)

// Status of the recording since this page was loaded, while it is being recorded: newer steps, and watchdog reports.
// Nothing on the page is updated automatically unless following is enabled.
window.overlapscope.watchNews = () => {
  const bar = document.getElementById("news")
  if (!bar) return
  const part = (name) => bar.querySelector(`.${name}`)
  const everyMs = 2000
  const followMs = 500
  const key = `overlapscope-follow ${location.pathname}`
  let begunMs = Date.now()
  let shown = null // status when the page was opened
  // A page that takes long to open is not reloaded continuously.
  let restMs = Math.max(followMs, 2 * performance.now())
  const follow = part("follow").querySelector("input")

  function remember(isFollowing) {
    try {
      if (isFollowing) sessionStorage.setItem(key, "1")
      else sessionStorage.removeItem(key)
    } catch {
      // Private windows may refuse to store; then this page is followed until it is reloaded.
    }
  }

  // A user who drags, types or has a menu open is not interrupted.
  let isPressed = false
  for (const type of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) {
    window.addEventListener(type, ({buttons}) => (isPressed = buttons > 0), {capture: true})
  }
  const typedIn = "input:not([type=checkbox], [type=radio], [type=range]):focus"
  const isInUse = () => isPressed || document.querySelector(`${typedIn}, :modal, :popover-open`) !== null

  // What the page shows may be older than what is recorded.
  const stateShown = (news) => (bar.dataset.step ? {...news, latest_step: Number(bar.dataset.step)} : news)

  let isReading = false
  let isAsked = false // the reader wants to see the latest step, and not only to be led on to it from the last one
  async function readAgain(news) {
    isReading = true
    const beganMs = Date.now()
    if (!(await window.overlapscope.showLatest?.())) {
      const hasStep = new URLSearchParams(location.search).has("step")
      return window.overlapscope.reloadInPlace(hasStep ? {step: news.latest_step, from: null, to: null} : {})
    }
    window.dispatchEvent(new CustomEvent("followed", {detail: {isAsked}}))
    shown = stateShown(news)
    isReading = isAsked = false
    ;[begunMs, restMs] = [Date.now(), Math.max(followMs, 2 * (Date.now() - beganMs))]
    document.body.dataset.followed = news.latest_step
    show(news)
  }

  // A page that was opened with all steps of a long recording, or with its latest, is reloaded with the other.
  const read = part("read")
  const isWhole = new URLSearchParams(location.search).has("read")
  read.addEventListener("click", () => window.overlapscope.reloadInPlace({read: read.dataset.read ?? null}))

  part("extent")?.querySelector("input").addEventListener("change", ({target}) => {
    if (target.reportValidity()) window.overlapscope.reloadInPlace({read: target.value})
  })

  function stateOf({is_live, age_s, off_since}) {
    if (!is_live) return "recorded"
    if (off_since !== null) return `recording is off since step ${off_since.toLocaleString("en-US")}`
    if (age_s === null || age_s < 2) return "recording"
    const age = age_s < 120 ? `${Math.round(age_s)} s` : `${Math.round(age_s / 60)} min`
    return `recording, the latest event is ${age} old`
  }

  function show(news) {
    shown ??= stateShown(news)
    const {is_live, latest_step} = news
    const newer = latest_step === null ? 0 : latest_step - (shown.latest_step ?? -1)
    const report = is_live || news.report !== shown.report ? news.report : ""
    bar.hidden = !is_live && newer <= 0 && !report && !read.dataset.read
    bar.classList.toggle("live", is_live)
    bar.classList.toggle("incident", Boolean(report))
    part("state").textContent = stateOf(news)
    read.hidden = !(read.dataset.read || (isWhole && is_live))
    // A page that follows shows them in a moment: a note would make the header flicker.
    const isNewer = newer > 0 && !follow.checked
    part("newer").textContent = isNewer ? `${newer.toLocaleString("en-US")} newer step${newer === 1 ? "" : "s"}` : ""
    part("show").hidden = !isNewer
    part("follow").hidden = !is_live
    const link = part("report")
    link.hidden = !report
    link.textContent = report
    const isRested = Date.now() - begunMs >= restMs
    if (newer > 0 && follow.checked && isRested && !isReading && !isInUse()) readAgain(news)
    part("show").onclick = () => {
      isAsked = true
      readAgain(news)
    }
  }

  async function look() {
    let isLive = true
    try {
      if (document.visibilityState === "visible") {
        const answer = await fetch(document.body.dataset.news, {cache: "no-store"})
        const news = await answer.json()
        isLive = news.is_live
        show(news)
      }
    } catch {
      // shell.js shows that the server is gone.
    }
    bar.ariaBusy = "false"
    setTimeout(look, !isLive ? 5 * everyMs : follow.checked ? followMs : everyMs)
  }

  try {
    follow.checked = sessionStorage.getItem(key) === "1"
  } catch {
    follow.checked = false
  }
  follow.addEventListener("change", () => {
    remember(follow.checked)
    isAsked = follow.checked
  })
  look()
}

// Reloads this page in place: the old page stays visible until the new one is drawn, then changes at once, with the
// same scroll, focus and open details. Browsers without view transitions show the new page while it is built.
;(() => {
  const key = "overlapscope-in-place"
  let next = null
  let isRestored = true
  const holdPicture = () => (document.getElementById("in-place").media = "all")
  // A page that a link leads to has no transition, so by then this page must not have one either.
  const letGo = () => next === null && (document.getElementById("in-place").media = "not all")

  // Path of an element on this page, which is valid on the same page with other figures.
  function pathOf(element) {
    if (element.id) return `#${CSS.escape(element.id)}`
    if (!element.parentElement) return ":root"
    const alike = Array.from(element.parentElement.children).filter((each) => each.localName === element.localName)
    return `${pathOf(element.parentElement)} > ${element.localName}:nth-of-type(${alike.indexOf(element) + 1})`
  }

  function look() {
    const all = [...document.querySelectorAll("*")]
    const paths = (test) => all.filter(test).map(pathOf)
    return {
      scrolled: all
        .filter((each) => each.scrollTop || each.scrollLeft)
        .map((each) => [pathOf(each), each.scrollTop, each.scrollLeft]),
      open: paths((each) => each.matches("details[open]")),
      unfolded: paths((each) => each.matches("[data-unfolded]")),
      focused: all
        .filter((each) => each === document.activeElement)
        .map((each) => [pathOf(each), each.matches(":focus-visible")]),
    }
  }

  // Restoring again, once all is drawn, undoes nothing that the reader has done meanwhile.
  const opened = new WeakSet()
  let hasScrolled = false

  function restore({scrolled, open, unfolded, focused}) {
    const find = (path) => document.querySelector(path)
    for (const details of open.map(find)) {
      if (!details || opened.has(details)) continue
      details.open = true
      opened.add(details)
    }
    for (const path of unfolded) find(path)?.querySelector("[data-unfold]")?.click()
    if (!hasScrolled) for (const [path, top, left] of scrolled) find(path)?.scrollTo({top, left, behavior: "instant"})
    if (document.activeElement !== document.body) return
    for (const [path, focusVisible] of focused) find(path)?.focus({preventScroll: true, focusVisible})
  }

  const isDrawn = () =>
    document.readyState !== "loading" &&
    !document.querySelector(":is(main:not(.empty), #news)[aria-busy=true]") &&
    (!document.querySelector("[data-root-id]") || window.Bokeh?.documents[0]?.is_idle)

  // Bokeh draws in the next frame what it received in this one.
  function whenDrawn(act) {
    requestAnimationFrame(() => (isDrawn() ? requestAnimationFrame(act) : whenDrawn(act)))
  }

  // With other entries in its address, as in setAddress.
  window.overlapscope.reloadInPlace = (entries = {}, how = {}) => {
    window.overlapscope.setAddress(entries, how)
    next = location.pathname + location.search
    holdPicture()
    location.replace(next) // a reload has no view transition
  }

  // An image that can't be shown, such as when a link was followed meanwhile, is not needed: the page is there.
  window.addEventListener("unhandledrejection", (event) => {
    const {reason} = event
    if (reason instanceof DOMException && /transition/i.test(reason.message)) event.preventDefault()
  })

  // A page that is reloaded before it is drawn is restored to the state before the first reload, but for a new focus.
  function lastSeen() {
    if (isRestored) return look()
    return document.activeElement === document.body ? seen : {...seen, focused: look().focused}
  }

  window.addEventListener("pagehide", () => {
    try {
      if (next !== null) sessionStorage.setItem(key, JSON.stringify({address: next, seen: lastSeen()}))
    } catch {
      // Private windows may refuse to store; then the page begins at its top.
    }
  })

  function takeSeen() {
    try {
      const {address, seen} = JSON.parse(sessionStorage.getItem(key))
      sessionStorage.removeItem(key)
      return address === location.pathname + location.search ? seen : null
    } catch {
      return null
    }
  }

  const seen = takeSeen()
  if (!seen) return
  isRestored = false
  for (const type of ["wheel", "touchmove", "keydown"]) {
    window.addEventListener(type, () => (hasScrolled = true), {capture: true, passive: true})
  }
  holdPicture()
  window.addEventListener("pagereveal", ({viewTransition}) => {
    if (!viewTransition) return letGo()
    // Below the image the page is as always: as a part of the transition it would get no clicks.
    const {style} = document.documentElement
    style.viewTransitionName = "none"
    viewTransition.finished.finally(() => {
      style.viewTransitionName = ""
      letGo()
    })
    whenDrawn(() => viewTransition.skipTransition())
  })
  document.addEventListener("DOMContentLoaded", () => restore(seen))
  whenDrawn(() => {
    restore(seen)
    isRestored = true
  })
})()
